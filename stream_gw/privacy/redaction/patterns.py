"""Patterns of secrets and personal data. RE2 matches them in linear time, whatever the text.

A pattern proposes, its check decides: checksums for cards and IBANs, libphonenumber's rules for phone numbers. Names
and postal addresses of persons are not recognized: that takes a language model.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any, NamedTuple

import phonenumbers
import re2

_REGIONS = ("US", "GB", "DE", "FR", "IN", "BR")
"""Regions whose national phone numbers are recognized; numbers with a country code always are."""


class Pattern(NamedTuple):
    kind: str
    """Word that replaces a match."""
    expression: Any
    check: Callable[[str], bool]
    group: int = 0
    """Group that is replaced; 0: the whole match."""


def _always(text: str) -> bool:
    return True


def is_card(text: str) -> bool:
    """True if the digits pass Luhn's check and are not one digit repeated."""
    digits = [int(digit) for digit in text if digit.isdecimal()]
    if len(set(digits)) < 2:
        return False
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def is_iban(text: str) -> bool:
    """True if the letters and digits pass the check of ISO 13616."""
    bare = text.replace(" ", "").replace("-", "")
    if not 15 <= len(bare) <= 34:
        return False
    return int("".join(str(int(char, 36)) for char in bare[4:] + bare[:4])) % 97 == 1


def is_phone(text: str) -> bool:
    """True for a number that is valid where its country code says, or else, as it is written there, in a region."""
    international = text.startswith(("+", "00"))
    if not international and not _is_written_national(text):
        return False
    number = "+" + text[2:] if text.startswith("00") else text
    for region in (None,) if international else _REGIONS:
        try:
            if phonenumbers.is_valid_number(phonenumbers.parse(number, region)):
                return True
        except phonenumbers.NumberParseException:
            continue
    return False


def _is_written_national(text: str) -> bool:
    """True for ``(212) 555-0100``, ``030 901820`` and ``212-555-0100``; a date or an order number is none."""
    groups = "".join(char if char.isdecimal() else " " for char in text).split()
    return len(groups) > 1 and (text[0] in "(0" or [len(group) for group in groups] == [3, 3, 4])


def is_ip6(text: str) -> bool:
    if text.count(":") < 2 or not any(char.isdecimal() for char in text):
        return False
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _pattern(kind: str, expression: str, check: Callable[[str], bool] = _always, group: int = 0) -> Pattern:
    options = re2.Options()
    options.log_errors = False
    return Pattern(kind, re2.compile(expression.encode(), options), check, group)


# Negated classes, because RE2 would expand counted Unicode classes to programs of 200,000 instructions
_WORD = r"""[^\x00-\x20\x7f"'<>()\[\]{},:;@\\|`]"""
_LABEL = r"""[^\x00-,./\x7f:-@\[-`{-~]"""
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
PATTERNS = (
    _pattern(
        "private key",
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----[^-]*"
        r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)?",
    ),
    _pattern("token", r"\bcap_[A-Za-z0-9_\-.]{32,}"),  # our capability tokens
    _pattern("token", r"\beyJ[A-Za-z0-9_\-]{8,}\.eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*"),  # a JWT
    _pattern("key", r"\b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b"),  # AWS
    _pattern(
        "key", r"(?i)aws.{0,20}?(?:secret|key).{0,20}?[=:\"'\s(]([A-Za-z0-9/+=]{40})(?:[^A-Za-z0-9/+=]|$)", group=1
    ),
    _pattern("key", r"\b(?:sk-|sgw_[a-z0-9]+_)[A-Za-z0-9_\-]{16,}"),  # OpenAI, Anthropic, ours
    _pattern("key", r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,}|glpat-[A-Za-z0-9_\-]{20,})"),
    _pattern("key", r"\b(?:xox[abeoprs]-[A-Za-z0-9\-]{10,}|[rs]k_(?:live|test)_[0-9A-Za-z]{10,})"),  # Slack, Stripe
    _pattern("key", r"\b(?:AIza[0-9A-Za-z_\-]{35}|ya29\.[0-9A-Za-z_\-]{20,}|hf_[A-Za-z0-9]{30,})"),  # Google
    _pattern("token", r"(?i)\bbearer\s+([A-Za-z0-9._~+/\-]{20,}=*)", group=1),
    _pattern(
        "password",
        r"(?i)(?:password|passwd|passphrase|pwd|secret|api[_\-]?key|access[_\-]?token)[\"']?\s*(?:[:=]|\bis\b)\s*"
        r"[\"']?([^\s\"',;]{6,})",
        group=1,
    ),
    _pattern("password", r"://[^/\s:@]{1,64}:([^/\s@]{1,256})@", group=1),  # in a URL
    _pattern("email", rf"{_WORD}+@(?:{_LABEL}+\.)+{_LABEL}+"),
    _pattern("iban", r"\b[A-Z]{2}[0-9]{2}(?:[ \-]?[A-Z0-9]{4}){2,7}(?:[ \-]?[A-Z0-9]{1,3})?\b", is_iban),
    _pattern("card", r"\b[0-9](?:[ \-]?[0-9]){12,18}\b", is_card),
    _pattern("ssn", r"\b(?:00[1-9]|0[1-9][0-9]|[1-578][0-9]{2}|6[0-57-9][0-9]|66[0-57-9])-[0-9]{2}-[0-9]{4}\b"),
    _pattern("ip", rf"\b(?:{_OCTET}\.){{3}}{_OCTET}\b"),
    _pattern("ip", r"[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}", is_ip6),
    _pattern("phone", r"(?:\+|\b00|\(|\b)[0-9][0-9()\-. /]{5,18}[0-9]\b", is_phone),
)
