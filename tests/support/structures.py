"""JSON schemas of the kinds that programs ask for; every text and list in them has a limit."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(**properties: Schema) -> Schema:
    """An object that has all of these and nothing else."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def text(most: int = 40) -> Schema:
    return {"type": "string", "maxLength": most}


def whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def some(item: Schema, most: int = 3, least: int = 1) -> Schema:
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


def pattern(of: str) -> Schema:
    return {"type": "string", "pattern": of}


IS_SO: Schema = {"type": "boolean"}
DATE: Schema = {"type": "string", "format": "date"}
PRICE = record(amount=whole(1, 9999), currency={"enum": ["EUR", "USD"]})
INGREDIENT = record(ingredient=text(), amount=text(20))
CUSTOMER = record(customer_name=text(), customer_email=text())
CABINS: Schema = {"enum": ["economy", "business", "first"]}
SCHEMAS: dict[str, Schema] = {
    "a person": record(first_name=text(), last_name=text(), age=whole(0, 120), email=text()),
    "a book": record(title=text(), author=text(), publication_year=whole(1500, 2030), genres=some(text(20))),
    "a recipe": record(recipe_name=text(), ingredients=some(INGREDIENT, 4, 2), preparation_minutes=whole(1, 240)),
    "a flight": record(departure_airport=text(20), departure_date=DATE, passengers=whole(1, 9), cabin_class=CABINS),
    "a weather report": record(location=text(), celsius=pattern("^-?[0-9]{1,2}\\.[0-9]$"), wind_kmh=whole(0, 200)),
    "a product in a shop": record(product_name=text(), price=PRICE, in_stock=IS_SO, description=text(80)),
    "an event": record(
        event_title=text(),
        start_time=pattern("^[0-2][0-9]:[0-5][0-9]$"),
        attendees=some(record(name=text(), yes=IS_SO)),
    ),
    "an order": record(customer=CUSTOMER, items=some(record(item_name=text(), quantity=whole(1, 99)))),
    "a country": record(country_name=text(), population=whole(1, 1500000000), official_languages=some(text(20))),
    "a phone call": record(phone_number=pattern("^[0-9]{3}-[0-9]{4}$"), minutes=whole(1, 120), summary=text(100)),
}
