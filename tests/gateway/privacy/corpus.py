"""Labelled text for redaction, made from a seed: every secret is synthetic. ``HARMLESS`` looks like secrets."""

from __future__ import annotations

import base64
import random
import string
from collections.abc import Callable
from typing import NamedTuple

_ALNUM = string.ascii_letters + string.digits
_WORDS = (
    "please",
    "check",
    "the",
    "order",
    "from",
    "last",
    "week",
    "and",
    "tell",
    "me",
    "why",
    "it",
    "failed",
    "again",
)


class Sample(NamedTuple):
    kind: str
    text: str
    secret: str
    """Part of the text that must not stay; empty: everything may stay."""


def _some(rng: random.Random, alphabet: str, count: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(count))


def _card(rng: random.Random) -> str:
    prefix = rng.choice(("4", "51", "55", "37", "6011", "3528"))
    length = 15 if prefix == "37" else 16
    digits = prefix + _some(rng, string.digits, length - 1 - len(prefix))
    total = sum(int(d) if i % 2 else (int(d) * 2 - 9 * (int(d) > 4)) for i, d in enumerate(reversed(digits)))
    digits += str(-total % 10)
    separator = rng.choice(("", " ", "-"))
    return separator.join(digits[i : i + 4] for i in range(0, len(digits), 4))


def _iban(rng: random.Random) -> str:
    country, length = rng.choice((("DE", 18), ("GB", 18), ("FR", 23), ("NL", 14), ("ES", 20)))
    bban = (_some(rng, string.ascii_uppercase, 4) if country in ("GB", "NL") else "") + _some(
        rng, string.digits, length
    )
    bban = bban[:length]
    check = 98 - int("".join(str(int(char, 36)) for char in bban + country + "00")) % 97
    iban = f"{country}{check:02d}{bban}"
    return " ".join(iban[i : i + 4] for i in range(0, len(iban), 4)) if rng.random() < 0.5 else iban


def _phone(rng: random.Random) -> str:
    form = rng.choice(
        ("+1 415-555-{}", "+44 20 7946 {}", "+49 30 9018{}", "(212) 555-{}", "+33 1 42 68 {}", "0044 20 7946 {}")
    )
    digits = f"{rng.randrange(1000, 9999)}"
    return form.format(digits if "68" not in form else f"{digits[:2]} {digits[2:]}")


def _email(rng: random.Random) -> str:
    name = _some(rng, string.ascii_lowercase, rng.randrange(3, 10))
    middle, end = rng.choice(("", ".", "+tag", "_")), rng.choice(("com", "co.uk", "de", "io"))
    return f"{name}{middle}{name[:2]}@{_some(rng, string.ascii_lowercase, 6)}.{end}"


def _b64(rng: random.Random, count: int) -> str:
    return base64.urlsafe_b64encode(rng.randbytes(count)).rstrip(b"=").decode()


def _jwt(rng: random.Random) -> str:
    return f"eyJhbGciOiJIUzI1NiJ9.eyJ{_b64(rng, 40)}.{_b64(rng, 32)}"


def _pem(rng: random.Random) -> str:
    kind = rng.choice(("", "RSA ", "EC ", "OPENSSH "))
    lines = "\n".join(base64.b64encode(rng.randbytes(48)).decode() for _ in range(6))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{lines}\n-----END {kind}PRIVATE KEY-----"


MAKERS: dict[str, Callable[[random.Random], str]] = {
    "email": _email,
    "phone": _phone,
    "iban": _iban,
    "card": _card,
    "ssn": lambda rng: f"{rng.randrange(100, 600)}-{rng.randrange(10, 99)}-{rng.randrange(1000, 9999)}",
    "ip": lambda rng: ".".join(str(rng.randrange(1, 255)) for _ in range(4)),
    "ip6": lambda rng: ":".join(f"{rng.randrange(1, 0xFFFF):x}" for _ in range(8)),
    "aws key": lambda rng: "AKIA" + _some(rng, string.ascii_uppercase + string.digits, 16),
    "aws secret": lambda rng: _some(rng, _ALNUM + "/+", 40),
    "our key": lambda rng: f"sgw_{_some(rng, 'abcdefghijklmnopqrstuvwxyz234567', 12)}_{_b64(rng, 43)}",
    "our token": lambda rng: f"cap_{_jwt(rng)}",
    "openai key": lambda rng: "sk-" + rng.choice(("", "proj-")) + _some(rng, _ALNUM, 40),
    "github key": lambda rng: rng.choice(("ghp_", "gho_", "ghs_")) + _some(rng, _ALNUM, 36),
    "slack key": lambda rng: f"xoxb-{_some(rng, string.digits, 12)}-{_some(rng, _ALNUM, 24)}",
    "jwt": _jwt,
    "private key": _pem,
    "password": lambda rng: _some(rng, _ALNUM + "!#$%", 12),
}
_LEADS = {"aws secret": "aws_secret_access_key = ", "password": "password: "}
HARMLESS = (
    "Order 20261125-118 was shipped at 10:20:30 and weighs 1234567 g.",
    "The build v3.11.7 of 2026-11-25 took 1732503600 ms; see commit 359821a4911ad7655cc3a261a0f3fabc5b7bf74b.",
    "std::vector<int> a::b::c; x[1:2:3]; 4.5.6 and 100,000,000 rows",
    "uuid 123e4567-e89b-12d3-a456-426614174000 and request 1234 5678 9012 3456",
    "Call f(1, 2) - 3 * (4 + 5) / 6 = 7; ratio 16:9, score 3-2, ISBN 978-3-16-148410-1",
    "He is @home, see example.com/path and a@b; the secret of good tea is water.",
    "a token costs 3; keys: ask-me-anything-about-the-weather-tomorrow",
    "SELECT 1 FROM t WHERE id = 9007199254740993 -- password policy",
)


def samples(seed: int, each: int = 40) -> list[Sample]:
    """Return ``each`` samples of every kind, and as many without a secret."""
    rng = random.Random(seed)
    found = []
    for kind, make in MAKERS.items():
        for _ in range(each):
            secret = make(rng)
            before, after = (" ".join(rng.choices(_WORDS, k=rng.randrange(0, 8))) for _ in range(2))
            opens, closes = rng.choice((("", ""), ("", ""), ("(", ")"), ('"', '"'), ("", ","), ("", ".")))
            text = f"{before} {_LEADS.get(kind, '')}{opens}{secret}{closes} {after}"
            found.append(Sample(kind, text, secret))
    found += [Sample("none", rng.choice(HARMLESS), "") for _ in range(each * 4)]
    return found
