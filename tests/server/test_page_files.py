"""The page's files as the server sends them: policy, types, no key, no paths; and what they use."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from edgespec.server.app import create_app, page_routes
from edgespec.server.service import Service, Services
from serving import BASE_URL

PATHS = [route.path for route in page_routes()]


@pytest.fixture
def page() -> TestClient:
    """Before its model is loaded."""
    return TestClient(create_app(Services(Service("demo"))), base_url=BASE_URL)


def test_every_file_has_the_policy_and_needs_no_key():
    service = Service("demo")  # no model is loaded: the page comes before it
    client = TestClient(create_app(Services(service, api_key="secret")), base_url=BASE_URL)
    assert "/" in PATHS and len(PATHS) > 8
    for path in PATHS:
        answered = client.get(path)
        assert answered.status_code == 200
        policy = answered.headers["content-security-policy"].split("; ")
        assert policy[0] == "default-src 'none'"
        assert {"script-src 'self'", "frame-ancestors 'none'"} <= set(policy)
        assert "unsafe" not in str(policy) and "*" not in str(policy)
        assert answered.headers["x-content-type-options"] == "nosniff"
    assert client.get("/props").status_code == 401


@pytest.mark.parametrize("path", ["/static/", "/static/app.py", "/static/../page.py", "/static/%2e%2e/page.py"])
def test_nothing_else_is_sent(page: TestClient, path: str):
    assert page.get(path).status_code == 404
    assert page.get(PATHS[0], headers={"Host": "evil.example"}).status_code == 403


def test_the_files_use_nothing_from_elsewhere(page: TestClient):
    own = [path for path in PATHS if not path.startswith("/static/vendor/")]  # what others wrote, the policy keeps
    texts = {path: page.get(path).text for path in own}
    for path, text in texts.items():
        addresses = set(re.findall(r"https?://[\w./-]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        used = re.findall(r'(?:src|href)="(/[^"#]+)"', text) + re.findall(r'from "\./([^"]+)"', text)
        for name in used:
            assert (name if name.startswith("/") else f"/static/{name}") in PATHS, f"{path} uses {name}"
    assert not re.search(r"\son\w+=|style=|<script>", texts["/"])  # the policy would block them


def test_every_button_does_something(page: TestClient):
    code = "".join(page.get(path).text for path in PATHS if path.endswith(".js") and "/vendor/" not in path)
    names = set(re.findall(r'data-do="([\w-]+)"', page.get("/").text))
    ids = set(re.findall(r'\$\("([\w-]+)"\)', code))
    assert {name for name in names if not re.search(rf'(?:"{name}"|\b{name})\s*[:(]', code)} == set()
    assert ids <= set(re.findall(r'id="([\w-]+)"', page.get("/").text))
