"""Argument parser of the command line: an error is one line that names the flag, with a suggestion."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from typing import NoReturn

_WRONG_FLAGS = 2


class Parser(argparse.ArgumentParser):
    """Prints an error without the usage, which of a role with sixty flags would push the error off the screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(_WRONG_FLAGS, f"{self.prog}: {message}\n{self.prog} --help lists what there is\n")

    def check_flags(self, flags: Sequence[str]) -> None:
        """End with an error that names each unknown flag and the flag that may be meant.

        argparse complains about a missing flag first, and does not say that it was misspelt.
        """
        known = sorted({name for parser in every_parser(self) for name in parser.flag_names()})
        for flag in flags:
            if flag == "--":
                return
            name = flag.partition("=")[0]
            if not name.startswith("--") or " " in name or any(each.startswith(name) for each in known):
                continue
            self.error(f"unknown flag {name}{_suggestion(name, known)}")

    def flag_names(self) -> list[str]:
        """Return the long flags of this parser."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def _check_value(self, action: argparse.Action, value: object) -> None:
        choices = action.choices
        if choices is not None and value not in choices:
            names = [str(choice) for choice in choices]
            if isinstance(action, argparse._SubParsersAction):
                what = "command" if action.metavar == "COMMAND" else "verb"
                raise argparse.ArgumentError(None, f"unknown {what} {value!r}{_suggestion(str(value), names)}")
        super()._check_value(action, value)


def every_parser(parser: argparse.ArgumentParser) -> Iterator[Parser]:
    """Yield the parser and those of its verbs, at every depth."""
    if isinstance(parser, Parser):
        yield parser
    for verbs in subparsers(parser).values():
        yield from every_parser(verbs)


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the verbs by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def flag_of(parser: argparse.ArgumentParser, dest: str) -> str:
    """Return the flag or the argument that sets ``dest``, as the user writes it; empty: there is none."""
    for each in every_parser(parser):
        for action in each._actions:
            if action.dest == dest:
                return action.option_strings[0] if action.option_strings else f"argument {dest}"
    return ""


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}" if len(known) <= 32 else ""
