"""API keys: where they come from, the tenants file, and what a key may ask for."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.request import ServiceTier, Tenant
from jaxserve.server.errors import ApiError
from jaxserve.server.keys import _FIELDS, KeyRights, hash_key, read_keys, read_tenants
from jaxserve.server.options import AccessOptions

KEYS = ("first-key-0123", "second-key-456", "third-key-789x")
HASHES = [hashlib.sha256(key.encode()).hexdigest() for key in KEYS]
PRIORITY, DEFAULT, FLEX = ServiceTier
WHOLE = f"""
[[tenants]]
name = "chat"
key_hash = "{HASHES[0].upper()}"
weight = 4
best_priority = -10
tiers = ["priority", "default"]
queue_share = 0.5

[[tenants]]
name = "crawler"
key_hash = "{HASHES[1]}"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tenants.toml"
    file.touch(0o600)
    return file


def tenant(**fields: str) -> str:
    """A table of the file; the values are TOML."""
    fields = {"name": '"a"', "key_hash": f'"{HASHES[0]}"'} | fields
    return "\n".join(["[[tenants]]", *(f"{name} = {value}" for name, value in fields.items() if value), ""])


def test_keys_come_from_options_file_environment_and_tenants(tmp_path: Path, path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"\n  {KEYS[1]}  \n\n{KEYS[0]}\n")
    path.write_text(tenant(key_hash=f'"{hash_key("a-tenants-key").hex()}"'))
    options = AccessOptions(api_key=(KEYS[0],), api_key_file=str(file), tenants=str(path))
    found = read_keys(options, (KEYS[2],))
    plain = {digest: rights for digest, rights in found.items() if not rights.tenant.name}
    assert plain == dict.fromkeys(map(hash_key, KEYS), KeyRights())
    assert found.keys() - plain.keys() == {hash_key("a-tenants-key")}


@pytest.mark.parametrize("key", ["", "short", "with blank 123", "umlaut-\xfcberall", "control-\x07-key"])
def test_keys_that_keep_nobody_out_are_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_keys(AccessOptions(api_key=(key,)), ())
    assert not key or key not in str(caught.value)


@pytest.mark.parametrize("name", ["api_key_file", "tenants"])
def test_a_file_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: .*nowhere"):
        read_keys(AccessOptions(**{name: str(tmp_path / "nowhere")}), ())


@pytest.mark.parametrize("name", ["api_key_file", "tenants"])
def test_a_fifo_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    """Both files are read again at a SIGHUP, and reading a FIFO that nobody writes never ends."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match=f"{name}: .*FIFO"):
        read_keys(AccessOptions(**{name: str(tmp_path / "fifo")}), ())


def test_a_tenants_file_grants_what_it_says(path: Path) -> None:
    path.write_text(WHOLE)
    assert read_tenants(str(path)) == {
        hash_key(KEYS[0]): KeyRights(Tenant("chat", 4, 0.5), -10, (PRIORITY, DEFAULT)),
        hash_key(KEYS[1]): KeyRights(Tenant("crawler", 1.0, 1.0), None, (PRIORITY, DEFAULT, FLEX)),
    }


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_tenants_file_that_others_may_write_is_refused(mode: int, path: Path) -> None:
    path.write_text(WHOLE)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"0{mode:o}.*chmod go-w"):
        read_tenants(str(path))
    path.chmod(0o644)
    assert len(read_tenants(str(path))) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[tenants]", "cannot be read: .*line 1"),
        ("", r"\[\[tenants\]\]"),
        ("tenants = []", r"\[\[tenants\]\]"),
        ("tenants = [1]", r"\[\[tenants\]\]"),
        ("[tenants]\nname = 'a'", r"\[\[tenants\]\]"),
        (f"port = 8000\n{tenant()}", "nothing else"),
        (tenant(key='"secret-key-1"'), "tenant 1 .*'key'.*name, key_hash, weight,"),
        (tenant(key_hash=""), "key_hash is missing"),
        (tenant(name=""), "name is missing"),
        (tenant(name='"other"'), "not 'other', got 'other'"),
        *((tenant(name=value), "name .*1 to 64") for value in ('""', '"a b"', f'"{"a" * 65}"', "7")),
        (tenant(key_hash='"secret-key-1"'), "key_hash .*64 hexadecimal digits$"),
        (tenant(key_hash=f'"{hashlib.sha256().hexdigest()}"'), "key_hash is that of an empty key"),
        *((tenant(weight=value), "weight .*0.001") for value in ("0", "-1", "inf", "nan", "true")),
        *((tenant(queue_share=value), "queue_share") for value in ("0", "1.1", "nan", '"1"')),
        *((tenant(best_priority=value), "best_priority") for value in ("0.5", "true", str(2**31))),
        *((tenant(tiers=value), "tiers") for value in ("[]", '"flex"', '["auto"]', "[[]]")),
        (tenant() + tenant(key_hash=f'"{HASHES[1]}"'), "tenant 2 .*'a'"),
        (tenant() + tenant(name='"b"'), "tenant 2 .*key_hash.*'a'"),
    ],
)
def test_a_malformed_tenants_file_is_refused_and_no_key_is_repeated(text: str, message: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_tenants(str(path))
    assert caught.value.field == "tenants" and str(path) in str(caught.value)
    assert "secret-key-1" not in str(caught.value)


def test_a_key_is_a_tenants_or_nobodys(path: Path) -> None:
    path.write_text(WHOLE)
    with pytest.raises(ConfigError, match="'crawler'") as caught:
        read_keys(AccessOptions(tenants=str(path)), (KEYS[1],))
    assert KEYS[1] not in str(caught.value)


@pytest.mark.parametrize(
    ("tiers", "name", "tier"),
    [
        ((PRIORITY, DEFAULT, FLEX), None, DEFAULT),
        ((PRIORITY, DEFAULT, FLEX), "auto", DEFAULT),
        ((PRIORITY, DEFAULT, FLEX), "priority", PRIORITY),
        ((PRIORITY, DEFAULT), "flex", None),
        ((FLEX,), "default", None),
        ((FLEX,), None, FLEX),
        ((FLEX, PRIORITY), "auto", FLEX),
    ],
)
def test_a_key_has_the_tiers_that_it_was_given(
    tiers: tuple[ServiceTier, ...], name: str | None, tier: ServiceTier | None
) -> None:
    rights = KeyRights(tiers=tiers)
    if tier is not None:
        assert rights.choose_tier(name) is tier
        return
    with pytest.raises(ApiError) as caught:
        rights.choose_tier(name)
    error = caught.value
    assert (error.status, error.param, error.code) == (403, "service_tier", "service_tier_not_allowed")
    assert all(str(each) in error.message for each in (name, *tiers))


@pytest.mark.parametrize(
    ("own", "best", "wanted", "priority"),
    [
        (None, 0, None, 0),
        (None, 5, None, 5),  # nobody has to name a priority
        (None, -5, None, 0),
        (None, -5, -5, -5),
        (None, 0, 7, 7),
        (-3, 0, -3, -3),  # a tenant's own replaces the server's
        (3, -9, None, 3),
        (3, -9, 3, 3),
    ],
)
def test_a_priority_is_at_most_the_best_of_the_key(
    own: int | None, best: int, wanted: int | None, priority: int
) -> None:
    assert KeyRights(best_priority=own).choose_priority(wanted, best) == priority


def test_a_better_priority_is_refused_for_the_key_or_for_everyone() -> None:
    with pytest.raises(ApiError, match=r"priority 2\b.*\b3\b") as caught:
        KeyRights(best_priority=3).choose_priority(2, 0)
    assert (caught.value.status, caught.value.param, caught.value.code) == (403, "priority", "priority_not_allowed")
    with pytest.raises(InvalidRequestError, match=r"^priority: .*at least 0"):
        KeyRights().choose_priority(-1, 0)


# docs/tiers.md


@pytest.mark.docs
def test_the_example_of_the_page_is_a_tenants_file_and_its_table_has_every_field(path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, flags=re.S)
    path.write_text(example)
    chat, crawler = read_tenants(str(path)).values()
    assert chat == KeyRights(Tenant("chat", weight=4), -10, (PRIORITY, DEFAULT))
    assert crawler == KeyRights(Tenant("crawler", queue_share=0.25), None, (FLEX,))
    table = page.partition("| Field |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([a-z_]+)` \|", table, flags=re.M) == [*_FIELDS]
