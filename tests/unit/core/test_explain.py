"""What differs between two identities, in words and as data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvpersist.core.explain import Named, Stored, explain
from kvpersist.core.identity import FIELDS, Identity

Make = Callable[..., Identity]
OLD, NEW = "kvp-" + "1" * 32, "kvp-" + "2" * 32


def as_named(identity: Identity, namespace: str) -> Named:
    return Named(namespace, f"/models/tiny/{namespace}", identity.as_dict())


def test_equal_identities_reuse_their_kv(identity: Make) -> None:
    one = as_named(identity(), OLD)
    explanation = explain(one, one, Stored(3, 4096, "rm -r /l2/x"))
    assert explanation.reusable
    assert explanation.lines() == [f"Both are {OLD}: stored KV is reused."]
    assert explanation.as_dict()["changes"] == []


def test_changed_fields_come_in_the_order_of_the_fields_with_values_meaning_and_effect(identity: Make) -> None:
    other = identity(codec="zstd", kv_cache_dtype="fp8", enforce_eager=True)
    explanation = explain(as_named(identity(), OLD), as_named(other, NEW), Stored(0, 0, ""))
    names = ["kv_cache_dtype", "enforce_eager", "codec"]
    assert [name for name, _, _ in explanation.changes] == names
    first, *changes, last = explanation.lines()
    assert first == f"{OLD} -> {NEW}: KV stored so far is not reused."
    assert changes[0].startswith("kv_cache_dtype: 'bfloat16' -> 'fp8'. KV dtype as vLLM spells it, resolved. ")
    assert changes[1].startswith("enforce_eager: False -> True. ")
    assert all(line.endswith(FIELDS[name].effect.en) for line, name in zip(changes, names))
    assert last == f"{OLD} keeps nothing on disk."


def test_what_is_left_behind_is_counted_with_the_way_back_and_the_way_to_remove_it(identity: Make) -> None:
    stored = Stored(415, 12_345_678_901, f"rm -r /l2/{OLD}")
    explanation = explain(as_named(identity(), OLD), as_named(identity(codec="lz4"), NEW), stored)
    assert explanation.lines()[2:] == [
        f"{OLD} keeps 415 objects, 12.346 GB, out of reach from here. They stay until eviction needs their room.",
        f"To use them again: ansible-playbook playbooks/rollback.yml -e kvp_rollback_to={OLD}",
        f"To remove them now: rm -r /l2/{OLD}",
    ]
    assert explanation.as_dict() == {
        "old": OLD,
        "new": NEW,
        "reusable": False,
        "changes": [
            {
                "name": "codec",
                "old": "none",
                "new": "lz4",
                "change": FIELDS["codec"].change.en,
                "effect": FIELDS["codec"].effect.en,
            }
        ],
        "stored": {"objects": 415, "bytes": 12_345_678_901, "remove": f"rm -r /l2/{OLD}"},
        "lines": explanation.lines(),
    }


def test_what_could_not_be_counted_is_said(identity: Make) -> None:
    explanation = explain(as_named(identity(), OLD), as_named(identity(codec="lz4"), NEW), None)
    assert explanation.lines()[-1] == f"What {OLD} keeps on disk could not be counted."
    assert explanation.as_dict()["stored"] is None


def test_a_namespace_given_by_hand_that_joins_two_identities_is_a_warning(identity: Make) -> None:
    explanation = explain(as_named(identity(), "mine"), as_named(identity(codec="lz4"), "mine"), Stored(1, 1, ""))
    assert explanation.reusable
    assert explanation.lines()[0] == "Both are stored as mine, by KV_PERSIST_NAMESPACE: nothing keeps their KV apart."
    assert explanation.lines()[1].startswith("codec: ")


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_an_earlier_version_did_not_know_is_named(name: str, identity: Make) -> None:
    fields = {key: value for key, value in identity().as_dict().items() if key != name}
    explanation = explain(Named(OLD, "/models/x", fields), as_named(identity(), NEW), None)
    assert explanation.changes == ((name, None, identity().as_dict()[name]),)
    assert explanation.lines()[1].startswith(f"{name}: not recorded -> ")
