from __future__ import annotations

import base64
import hmac
import string
import warnings
from pathlib import Path

import jwt
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.errors import BadRequest, Forbidden, Unauthenticated
from stream_fabric.events import Prices
from stream_fabric.limits import CONTENT_BYTES, CONTENT_BYTES_MAX, USER_CHARS_MAX
from stream_fabric.pool.placement import TIERS
from stream_fabric.process.host import HostRandom
from stream_fabric.stream.ids import TenantId, UserId
from stream_gw.auth import (
    ALL_SCOPES,
    TOKEN_S_MAX,
    Authenticator,
    KeyStore,
    KeyUse,
    Principal,
    TokenRequest,
    bearer,
    dev_record,
    key_digest,
    new_key,
    read_keys_file,
    tokens,
)
from stream_gw.auth.tokens import Claims, TokenSigner

SECRET = b"sixteen bytes at least"
NOW = 1_800_000_000.0
KEY = "sk-test"
OWNER = Principal(TenantId("acme"), ALL_SCOPES)


@pytest.fixture
def authenticator() -> Authenticator:
    return Authenticator(KeyStore([dev_record("acme", KEY)]), TokenSigner(SECRET))


def load(tmp_path: Path, text: str) -> KeyStore:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return KeyStore(read_keys_file(path))


# --- the keys file -------------------------------------------------------------------------------------------


def test_a_keys_file(tmp_path: Path) -> None:
    full, narrow = new_key(HostRandom()), new_key(HostRandom())
    store = load(
        tmp_path,
        f"""
        [[tenant]]
        id = "acme"
        [[tenant.key]]
        sha256 = "{key_digest(full)}"
        [[tenant.key]]
        sha256 = "{key_digest(narrow).upper()}"
        scopes = ["read", "cancel"]
        models = ["m1"]
        [[tenant]]
        id = "without-keys"
        """,
    )
    everything, some = store.find(full, NOW), store.find(narrow, NOW)
    assert everything == Principal(TenantId("acme"), ALL_SCOPES, key=KeyUse(key_digest(full)[:12]))
    assert some is not None
    assert (some.scopes, some.models) == ({"read", "cancel"}, {"m1"})
    assert store.find("sk-other", NOW) is None
    assert store.find(key_digest(full), NOW) is None, "the hash is no key"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[[tenant]]\nid = acme\n", ["line 2"]),
        ("", ["tenant"]),
        ('[[tenant]]\nname = "acme"', ["name", "tenant"]),
        ("[[tenant]]\nid = 5", ["tenant[0].id", "str"]),
        ('[[tenant]]\nid = ""', ["tenant[0].id", "length >= 1"]),
        ('[[tenant]]\nid = "a"\n[[tenant.key]]\nscopes = []', ["sha256", "tenant[0].key[0]"]),
        ('[[tenant]]\nid = "a"\n[[tenant.key]]\nsha256 = "abc"', ["'a'", "sha256", "64 hex digits"]),
        (f'[[tenant]]\nid = "a"\n[[tenant.key]]\nsha256 = "{"z" * 64}"', ["'a'", "sha256", "64 hex digits"]),
        (f'[[tenant]]\nid = "a"\n[[tenant.key]]\nsha256 = "{"0" * 64}"\nscopes = ["write"]', ["write", "scopes"]),
        (f'[[tenant]]\nid = "a"\n[[tenant.key]]\nsha256 = "{"0" * 64}"\nmodel = "m"', ["model", "tenant[0].key[0]"]),
        ('[[tenant]]\nid = "a"\n[plan.eu]\nregions = ["eu west"]', ["plan[...].regions", "regex"]),
    ],
)
def test_a_wrong_keys_file_names_file_and_field(tmp_path: Path, text: str, names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"keys\.toml") as caught:
        load(tmp_path, text)
    assert all(name in str(caught.value) for name in names), str(caught.value)


def test_prices_a_tenants_own_come_first_and_then_those_of_the_tier(tmp_path: Path) -> None:
    store = load(
        tmp_path,
        """
        [price."llama"]
        prompt = 150000
        cached = 75000
        output = 600000
        [price."llama@batch"]
        prompt = 75000
        output = 300000
        [price."*"]
        prompt = 10
        [price."*@free"]
        prompt = 1
        [[tenant]]
        id = "acme"
        [tenant.price."*"]
        output = 500000
        """,
    )
    acme, other = TenantId("acme"), TenantId("other")
    standard, batch, free = map(TIERS.index, ("standard", "batch", "free"))
    assert store.prices(acme, "llama", standard) == Prices(0, 0, 500_000)
    assert store.prices(acme, "llama", batch) == Prices(0, 0, 500_000)
    assert store.prices(other, "llama", standard) == Prices(150_000, 75_000, 600_000)
    assert store.prices(other, "llama", batch) == Prices(75_000, 75_000, 300_000)
    assert store.prices(other, "llama", free) == Prices(150_000, 75_000, 600_000), "the model's own come before *@free"
    assert store.prices(other, "else", standard) == Prices(10, 10, 0), "what is cached costs what the others do"
    assert store.prices(other, "else", free) == Prices(1, 1, 0)
    assert KeyStore([dev_record("acme", KEY)]).prices(acme, "llama", standard) is None
    with pytest.raises(ValueError, match=r"keys\.toml.*prompt"):
        load(tmp_path, '[price."m"]\nprompt = -1\n[[tenant]]\nid = "a"\n')


def test_one_key_of_two_tenants_is_refused(tmp_path: Path) -> None:
    entry = '[[tenant]]\nid = "%s"\n[[tenant.key]]\nsha256 = "' + "0" * 64 + '"\n'
    with pytest.raises(ValueError, match=r"keys\.toml.*'b'"):
        load(tmp_path, entry % "a" + entry % "b")


def test_a_keys_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"keys\.toml"):
        KeyStore(read_keys_file(path))


def test_a_missing_keys_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"keys\.toml"):
        read_keys_file(tmp_path / "keys.toml")


# --- keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "credential", [None, "", "sk-wrong", KEY + " ", KEY.upper(), "x" * 5000, "cap_", "cap_.", "cap_a.b"]
)
def test_an_unknown_credential_is_refused(authenticator: Authenticator, credential: str | None) -> None:
    with pytest.raises(Unauthenticated):
        authenticator.authenticate(credential, NOW)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        TokenSigner(b"fifteen bytes..")


@pytest.mark.parametrize(
    ("headers", "credential"),
    [
        ([(b"authorization", b"Bearer sk-1")], "sk-1"),
        ([(b"authorization", b"bearer  sk-1 ")], "sk-1"),
        ([(b"x-api-key", b"sk-1")], "sk-1"),
        ([(b"authorization", b"Basic c2s=")], None),
        ([(b"authorization", b"")], None),
        ([], None),
    ],
)
def test_the_credential_of_headers(headers: list[tuple[bytes, bytes]], credential: str | None) -> None:
    assert bearer(headers) == credential


def test_new_keys_differ_and_are_long() -> None:
    keys = {new_key(HostRandom()) for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) > 40


# --- capability tokens ---------------------------------------------------------------------------------------


def test_a_minted_token_carries_the_requested_rights(authenticator: Authenticator) -> None:
    asked = TokenRequest(scopes=["read", "cancel"], user="u1", models=["m1"], expires_in_s=60)
    token, expires_at = authenticator.mint(OWNER, asked, NOW)
    assert token.startswith("cap_")
    assert expires_at == NOW + 60
    who = authenticator.authenticate(token, NOW + 59)
    assert who == Principal(TenantId("acme"), frozenset({"read", "cancel"}), "u1", frozenset({"m1"}), NOW + 60)
    assert who.may_see("u1")
    assert not who.may_see("u2")
    assert not who.may_see(None)
    with pytest.raises(Forbidden, match="create"):
        who.require("create")
    assert who.may_use("m1")
    assert not who.may_use("m2")


@pytest.mark.parametrize("user", ["", "u" * (USER_CHARS_MAX + 1)])
def test_a_token_names_a_user_of_a_fit_length(authenticator: Authenticator, user: str) -> None:
    with pytest.raises(BadRequest, match=f"1 to {USER_CHARS_MAX}"):
        authenticator.mint(OWNER, TokenRequest(user=user), NOW)
    authenticator.mint(OWNER, TokenRequest(user="u" * USER_CHARS_MAX), NOW)


def test_a_token_of_an_empty_user_is_refused(authenticator: Authenticator) -> None:
    """Earlier releases minted it. Its holder read the usage, the limits and the chats of the whole tenant."""
    token = TokenSigner(SECRET).sign(Claims("acme", ["read"], int(NOW) + 60, ""))
    with pytest.raises(Unauthenticated, match="empty user"):
        authenticator.authenticate(token, NOW)


def test_a_token_ends_at_its_second(authenticator: Authenticator) -> None:
    token, expires_at = authenticator.mint(OWNER, TokenRequest(expires_in_s=5), NOW)
    authenticator.authenticate(token, expires_at - 0.001)
    with pytest.raises(Unauthenticated, match="expired"):
        authenticator.authenticate(token, expires_at)


def test_a_token_of_another_fleet_is_refused(authenticator: Authenticator) -> None:
    other = Authenticator(KeyStore([dev_record("acme", KEY)]), TokenSigner(SECRET + b"!"))
    token, _ = other.mint(OWNER, TokenRequest(), NOW)
    with pytest.raises(Unauthenticated):
        authenticator.authenticate(token, NOW)


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def unnamed_key_token(secret: bytes) -> str:
    """A token of the release before key ids."""
    body = encoded(msgspec.json.encode(["acme", ["read"], "u1", ["m1"], NOW + 60]))
    return f"cap_{body}.{encoded(hmac.digest(secret, body.encode(), 'sha256'))}"


def test_claims_cannot_be_changed(authenticator: Authenticator) -> None:
    token, _ = authenticator.mint(OWNER, TokenRequest(scopes=["read"], expires_in_s=60), NOW)
    head, body, signature = token.removeprefix("cap_").split(".")
    claims = msgspec.json.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    claims["scopes"] = ["create", "read"]
    forged = encoded(msgspec.json.encode(claims))
    unsigned = encoded(b'{"alg":"none","typ":"JWT"}')
    for attempt in (
        f"{head}.{forged}.{signature}", f"{head}.{forged}.", f"{head}.{forged}", f"{head}.{body}", body,
        f"{unsigned}.{forged}.", f"{unsigned}.{forged}.{signature}", f"{forged}.{signature}",
    ):  # fmt: skip
        with pytest.raises(Unauthenticated):
            authenticator.authenticate(f"cap_{attempt}", NOW)


_LETTERS = string.ascii_letters + string.digits + "-_.é=\ud800"


@pytest.mark.parametrize("named", [True, False])
@given(st.data())
def test_a_token_with_any_letter_changed_is_refused(named: bool, data: st.DataObject) -> None:
    authenticator = Authenticator(KeyStore([dev_record("acme", KEY)]), TokenSigner(SECRET))
    token = authenticator.mint(OWNER, TokenRequest(), NOW)[0] if named else unnamed_key_token(SECRET)
    authenticator.authenticate(token, NOW)
    at = data.draw(st.integers(0, len(token) - 1))
    letter = data.draw(st.sampled_from(_LETTERS).filter(lambda c: c != token[at]))
    with pytest.raises(Unauthenticated):
        authenticator.authenticate(token[:at] + letter + token[at + 1 :], NOW)


@pytest.mark.parametrize("named", [True, False])
def test_a_signature_has_one_valid_encoding(authenticator: Authenticator, named: bool) -> None:
    token = authenticator.mint(OWNER, TokenRequest(), NOW)[0] if named else unnamed_key_token(SECRET)
    authenticator.authenticate(token, NOW)
    alphabet = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
    at = alphabet.index(token[-1])
    # These decode to the same bytes, for decoders that ignore unused bits, padding and letters of no meaning
    same_bits = [token[:-1] + alphabet[at ^ bits] for bits in (1, 2, 3)]
    for attempt in (*same_bits, token + "=", token + "!", token[:-5] + "\n" + token[-5:]):
        with pytest.raises(Unauthenticated):
            authenticator.authenticate(attempt, NOW)


def test_a_secret_is_changed_while_its_tokens_live() -> None:
    old, new = b"the secret of yesterday", b"the secret of today"
    keys = KeyStore([dev_record("acme", KEY)])
    before, prepared, changed, after = (
        Authenticator(keys, signer)
        for signer in (TokenSigner(old), TokenSigner(old, [new]), TokenSigner(new, [old]), TokenSigner(new))
    )
    by_old, by_new = before.mint(OWNER, TokenRequest(), NOW)[0], changed.mint(OWNER, TokenRequest(), NOW)[0]
    for authenticator in (prepared, changed):
        assert authenticator.authenticate(by_old, NOW) == authenticator.authenticate(by_new, NOW)
        authenticator.authenticate(unnamed_key_token(old), NOW)
    after.authenticate(by_new, NOW)
    before.authenticate(prepared.mint(OWNER, TokenRequest(), NOW)[0], NOW)
    for token in (by_old, unnamed_key_token(old)):
        with pytest.raises(Unauthenticated):
            after.authenticate(token, NOW)
    with pytest.raises(ValueError, match="16 bytes"):
        TokenSigner(new, [b"fifteen bytes.."])


def test_verified_tokens_are_kept_up_to_a_limit_and_still_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_VERIFIED_MAX", 3)
    signer = TokenSigner(SECRET)
    authenticator = Authenticator(KeyStore([dev_record("acme", KEY)]), signer)
    minted = [authenticator.mint(OWNER, TokenRequest(user=f"u{n}", expires_in_s=60), NOW)[0] for n in range(9)]
    for token in minted * 2:
        assert authenticator.authenticate(token, NOW) == authenticator.authenticate(token, NOW)
    assert len(signer._verified) == 3
    with pytest.raises(Unauthenticated, match="expired"):
        authenticator.authenticate(minted[-1], NOW + 60)


def test_a_token_of_the_previous_release_is_accepted_until_it_expires(authenticator: Authenticator) -> None:
    token = unnamed_key_token(SECRET)
    who = authenticator.authenticate(token, NOW)
    assert who == Principal(TenantId("acme"), frozenset({"read"}), UserId("u1"), frozenset({"m1"}), NOW + 60)
    with pytest.raises(Unauthenticated, match="expired"):
        authenticator.authenticate(token, NOW + 60)


def test_a_jwt_that_the_same_secret_signed_for_another_purpose_is_refused(authenticator: Authenticator) -> None:
    claims = {"tenant": "acme", "scopes": ["read"], "exp": int(NOW) + 60, "aud": "stream-gw"}
    token, _ = authenticator.mint(OWNER, TokenRequest(), NOW)
    header = jwt.get_unverified_header(token.removeprefix("cap_"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jwt.InsecureKeyLengthWarning)
        foreign = jwt.encode(claims, SECRET, "HS256", headers={"kid": header["kid"]})
    with pytest.raises(Unauthenticated):
        authenticator.authenticate(f"cap_{foreign}", NOW)
    signer = TokenSigner(SECRET)
    (key,) = signer._keys.values()
    for wrong in ({"aud": "another"}, {"exp": "soon"}, {"scopes": ["everything"]}, {"tenant": 5}):
        token = "cap_" + jwt.encode(claims | wrong, key, "HS256", headers={"kid": header["kid"]})
        assert signer.verify(token) is None, wrong
    for missing in claims:
        rest = {name: value for name, value in claims.items() if name != missing}
        assert signer.verify("cap_" + jwt.encode(rest, key, "HS256", headers={"kid": header["kid"]})) is None, missing


@pytest.mark.parametrize(
    "header",
    [b"[" * 2900, b"{" * 2900, b'{"alg":"HS256","kid":' + b"[" * 2800, b"[]", b'{"alg":"HS256","kid":5}', b"\xff", b""],
)
def test_an_invalid_token_header_is_refused(authenticator: Authenticator, header: bytes) -> None:
    with pytest.raises(Unauthenticated):
        authenticator.authenticate(f"cap_{encoded(header)}.e30.{'A' * 43}", NOW)


def test_a_token_above_the_length_limit_is_not_minted(authenticator: Authenticator) -> None:
    models = [f"a-model-of-some-length-{k}" for k in range(90)]
    token, _ = authenticator.mint(OWNER, TokenRequest(models=models), NOW)
    assert authenticator.authenticate(token, NOW).models == frozenset(models)
    with pytest.raises(BadRequest, match="fewer models"):
        authenticator.mint(OWNER, TokenRequest(models=models * 2), NOW)


def test_a_key_grants_no_more_than_it_has(authenticator: Authenticator) -> None:
    narrow = Principal(TenantId("acme"), frozenset({"read"}), models=frozenset({"m1", "m2"}))
    with pytest.raises(Forbidden, match="create"):
        authenticator.mint(narrow, TokenRequest(scopes=["read", "create"]), NOW)
    for asked, granted in ((None, {"m1", "m2"}), (["m2", "m3"], {"m2"}), (["m3"], set())):
        token, _ = authenticator.mint(narrow, TokenRequest(scopes=["read"], models=asked), NOW)
        assert authenticator.authenticate(token, NOW).models == granted


def test_a_token_cannot_mint_a_token(authenticator: Authenticator) -> None:
    token, _ = authenticator.mint(OWNER, TokenRequest(), NOW)
    with pytest.raises(Forbidden, match="use an API key"):
        authenticator.mint(authenticator.authenticate(token, NOW), TokenRequest(), NOW)


@pytest.mark.parametrize("seconds", [0, -1, TOKEN_S_MAX + 1])
def test_a_token_lives_a_day_at_most(authenticator: Authenticator, seconds: int) -> None:
    with pytest.raises(BadRequest, match=str(TOKEN_S_MAX)) as caught:
        authenticator.mint(OWNER, TokenRequest(expires_in_s=seconds), NOW)
    assert caught.value.param == "expires_in_s"


def test_content_is_stored_only_for_tenants_whose_entry_allows_it(tmp_path: Path) -> None:
    def plan(text: str) -> int:
        return load(tmp_path, text).content_bytes(TenantId("acme"))

    tenant = '[[tenant]]\nid = "acme"\n'
    assert plan(tenant) == 0
    assert plan(tenant + "trace_content_bytes = 100\n") == 0
    assert plan(tenant + "trace_content = false\n") == 0
    assert plan('[[tenant]]\nid = "globex"\ntrace_content = true\n') == 0
    assert plan(tenant + "trace_content = true\n") == CONTENT_BYTES
    assert plan(tenant + "trace_content = true\ntrace_content_bytes = 100\n") == 100
    assert plan(tenant + "trace_content = true\n" + tenant) == 0, "it stands there twice"
    assert KeyStore([dev_record("acme", KEY)]).content_bytes(TenantId("acme")) == 0
    for wrong in ("trace_content = 1", "trace_content_bytes = 0", f"trace_content_bytes = {CONTENT_BYTES_MAX + 1}"):
        with pytest.raises(ValueError, match="trace_content"):
            plan(tenant + wrong)
