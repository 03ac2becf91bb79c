"""Addresses of RPC servers, and where options place target and draft."""

from __future__ import annotations

import pytest

from edgespec.config.options import LoadOptions
from edgespec.config.values import parse_endpoints, split_endpoint
from edgespec.errors import ConfigError


def test_servers_are_split_at_commas_and_keep_their_order():
    assert parse_endpoints("b:1, a.example-1.net:65535,10.0.0.1:050052") == (
        "b:1",
        "a.example-1.net:65535",
        "10.0.0.1:50052",
    )
    assert split_endpoint("a.b:50052") == ("a.b", 50052)


@pytest.mark.parametrize(
    "text",
    [
        *("", None, "host", ":50052", "a b:1", "host:", "host:0", "host:65536", "host:x", "host:\u0661"),
        *("[::1]:50052", "::1", "a:1,,b:2", "a:1,b:2,a:01", ",".join(f"h{i}:1" for i in range(17))),
    ],
)
def test_what_is_no_list_of_servers_is_refused_with_the_form(text):
    with pytest.raises(ConfigError, match="is no list of servers: give HOST:PORT"):
        parse_endpoints(text)


def test_options_refuse_it_too():
    with pytest.raises(ConfigError, match="HOST:PORT"):
        LoadOptions(rpc="nowhere")
    with pytest.raises(ConfigError, match="is not a device"):
        LoadOptions(device="Vulkan0,,")
    with pytest.raises(ConfigError, match="corpus must be True or False"):
        LoadOptions(corpus=1)


@pytest.mark.parametrize(
    ("given", "target", "draft"),
    [
        ({}, (0, None), (0, None)),
        ({"gpu_layers": 5}, (5, None), (5, None)),
        ({"gpu_layers": 5, "draft_gpu_layers": 0}, (5, None), (0, None)),
        ({"device": "A,B"}, (-1, ("A", "B")), (-1, ("A", "B"))),
        ({"device": "A", "draft_device": "none"}, (-1, ("A",)), (0, ())),
        ({"device": "none", "draft_device": "A"}, (0, ()), (-1, ("A",))),
        ({"gpu_layers": -1, "draft_device": "none"}, (-1, None), (0, ())),
        ({"rpc": "h:1"}, (-1, None), (0, None)),
        ({"rpc": "h:1", "gpu_layers": 7}, (7, None), (0, None)),
        ({"rpc": "h:1", "draft_device": "A"}, (-1, None), (-1, ("A",))),
        ({"rpc": "h:1", "device": "RPC0", "draft_gpu_layers": 3}, (-1, ("RPC0",)), (3, None)),
    ],
    ids=str,
)
def test_target_and_draft_are_placed_apart(given, target, draft):
    options = LoadOptions(**given)
    assert (options.target_gpu_layers, options.target_devices) == target
    assert (options.draft_model_gpu_layers, options.draft_devices) == draft
