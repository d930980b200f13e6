"""``stream-gw completion``: prints the completion script of a shell, made from the parsers of all commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from stream_gw.cli.parser import subparsers

_EPILOG = """bash: stream-gw completion bash > ~/.local/share/bash-completion/completions/stream-gw;
zsh: stream-gw completion zsh > "${fpath[1]}/_stream-gw";
fish: stream-gw completion fish > ~/.config/fish/completions/stream-gw.fish"""

_BASH = """_stream_gw() {
    local current=${COMP_WORDS[COMP_CWORD]} path="" word words
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case $word in -*) ;; *) case "$path $word" in @PATHS@) path="$path $word" ;; esac ;; esac
    done
    case "$path ${COMP_WORDS[COMP_CWORD-1]}" in
@CHOICES@
        *) case "$path" in
@WORDS@
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [ ${#COMPREPLY[@]} -gt 0 ] || COMPREPLY=($(compgen -f -- "$current"))
}
complete -o filenames -F _stream_gw stream-gw
"""
_ZSH = "#compdef stream-gw\nautoload -U +X bashcompinit && bashcompinit\n"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell to complete in")
    parser.epilog = _EPILOG


def run(args: argparse.Namespace) -> int:
    paths = dict(_every_path("", _all_commands()))
    print({"bash": _bash, "zsh": lambda found: _ZSH + _bash(found), "fish": _fish}[args.shell](paths), end="")
    return 0


def _all_commands() -> argparse.ArgumentParser:
    """Return the parser with the flags of every command."""
    from stream_gw.cli.main import load_command, make_parsers

    parser, parsers = make_parsers()
    for name, each in parsers.items():
        load_command(name).add_flags(each)
    return parser


def _every_path(path: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield (path, parser) of the command line, its commands and their verbs; a path is `` replicas drain``."""
    yield path, parser
    for name, verb in subparsers(parser).items():
        yield from _every_path(f"{path} {name}", verb)


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """List what may follow: verbs, flags, and the values of arguments that have a choice."""
    flags = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    chosen = [
        str(choice) for action in parser._actions if not action.option_strings for choice in list(action.choices or ())
    ]
    return [*chosen, *flags]


def _choices(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    """Yield (flag, values) of flags with a choice."""
    for action in parser._actions:
        if action.option_strings and action.choices:
            yield action.option_strings[-1], [str(choice) for choice in action.choices]


def _bash(paths: dict[str, argparse.ArgumentParser]) -> str:
    words = [f'            "{path}") words="{" ".join(_words(parser))}" ;;' for path, parser in paths.items()]
    choices = [
        f'        "{path} {flag}") words="{" ".join(values)}" ;;'
        for path, parser in paths.items()
        for flag, values in _choices(parser)
    ]
    known = "|".join(f'"{path}"' for path in paths if path)
    script = _BASH.replace("@PATHS@", known).replace("@WORDS@", "\n".join(words))
    return script.replace("@CHOICES@", "\n".join(choices))


def _fish(paths: dict[str, argparse.ArgumentParser]) -> str:
    lines = ["complete -c stream-gw -f"]
    for path, parser in paths.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in path.split())
        condition = seen or "__fish_use_subcommand"
        for name in subparsers(parser):
            lines.append(f"complete -c stream-gw -n '{condition}' -a {name}")
        values = dict(_choices(parser))
        for action in parser._actions:
            for flag in action.option_strings[-1:]:
                takes = (
                    "" if action.nargs == 0 else f" -x -a '{' '.join(values[flag])}'" if flag in values else " -r -F"
                )
                lines.append(f"complete -c stream-gw -n '{condition}' -l {flag.removeprefix('--')}{takes}")
    return "\n".join(lines) + "\n"
