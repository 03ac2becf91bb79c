"""Twenty JSON schemas of the kinds that programs ask for; every text and list in them has a limit."""

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


SCHEMAS: list[tuple[str, str, Schema]] = [
    ("person", "a person", record(first_name=text(), last_name=text(), age=whole(0, 120), email=text())),
    (
        "address",
        "an address",
        record(street=text(), house_number=whole(1, 999), city=text(), postal_code=text(10), country=text()),
    ),
    ("book", "a book", record(title=text(), author=text(), publication_year=whole(1500, 2030), genres=some(text(20)))),
    (
        "recipe",
        "a recipe",
        record(
            recipe_name=text(),
            ingredients=some(record(ingredient=text(), amount=text(20)), 4, 2),
            preparation_minutes=whole(1, 240),
        ),
    ),
    (
        "flight",
        "a flight booking",
        record(
            departure_airport=text(20),
            arrival_airport=text(20),
            departure_date={"type": "string", "format": "date"},
            passenger_count=whole(1, 9),
            cabin_class={"enum": ["economy", "business", "first"]},
        ),
    ),
    (
        "weather",
        "a weather report",
        record(
            location=text(),
            temperature_celsius={"type": "string", "pattern": "^-?[0-9]{1,2}\\.[0-9]$"},
            conditions={"enum": ["sunny", "cloudy", "rain", "snow"]},
            wind_speed_kmh=whole(0, 200),
        ),
    ),
    (
        "product",
        "a product in a shop",
        record(
            product_name=text(),
            price=record(amount=whole(1, 9999), currency={"enum": ["EUR", "USD"]}),
            in_stock={"type": "boolean"},
            description=text(80),
        ),
    ),
    ("movie", "a movie", record(title=text(), director=text(), release_year=whole(1900, 2030), rating=whole(1, 10))),
    (
        "event",
        "an event in a calendar",
        record(
            event_title=text(),
            start_time={"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"},
            location=text(),
            attendees=some(record(attendee_name=text(), is_confirmed={"type": "boolean"})),
        ),
    ),
    (
        "order",
        "an order",
        record(
            order_number=whole(1, 99999),
            customer=record(customer_name=text(), customer_email=text()),
            items=some(record(item_name=text(), quantity=whole(1, 99))),
        ),
    ),
    (
        "country",
        "a country",
        record(
            country_name=text(), capital_city=text(), population=whole(1, 1500000000), official_languages=some(text(20))
        ),
    ),
    (
        "review",
        "a review of a restaurant",
        record(restaurant_name=text(), stars=whole(1, 5), review_text=text(120), would_recommend={"type": "boolean"}),
    ),
    (
        "ticket",
        "a support ticket",
        record(
            ticket_id=whole(1, 99999),
            subject=text(60),
            priority={"enum": ["low", "medium", "high"]},
            status={"enum": ["open", "closed"]},
            description=text(100),
        ),
    ),
    (
        "animal",
        "an animal",
        record(
            common_name=text(),
            scientific_name=text(),
            habitat=text(),
            average_lifespan_years=whole(1, 200),
            is_endangered={"type": "boolean"},
        ),
    ),
    (
        "job",
        "a job offer",
        record(
            job_title=text(),
            company_name=text(),
            salary_range=record(minimum_salary=whole(1000, 99999), maximum_salary=whole(1000, 999999)),
            required_skills=some(text(20)),
        ),
    ),
    (
        "song",
        "a song",
        record(song_title=text(), artist_name=text(), album_name=text(), duration_seconds=whole(30, 900)),
    ),
    (
        "course",
        "a course",
        record(course_name=text(), instructor=text(), number_of_lessons=whole(1, 99), topics_covered=some(text(30))),
    ),
    (
        "car",
        "a car",
        record(
            manufacturer=text(20),
            model_name=text(20),
            model_year=whole(1950, 2030),
            fuel_type={"enum": ["petrol", "diesel", "electric"]},
            number_of_doors=whole(2, 5),
        ),
    ),
    (
        "patient",
        "a patient record",
        record(
            patient_name=text(),
            date_of_birth={"type": "string", "format": "date"},
            blood_type={"enum": ["A", "B", "AB", "0"]},
            known_allergies=some(text(20)),
        ),
    ),
    (
        "call",
        "a phone call",
        record(
            caller_name=text(),
            phone_number={"type": "string", "pattern": "^[0-9]{3}-[0-9]{4}$"},
            call_duration_minutes=whole(1, 120),
            call_summary=text(100),
        ),
    ),
]
