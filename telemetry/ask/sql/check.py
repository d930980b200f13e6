"""The check of an analyst's SQL: one SELECT over the telemetry tables passes, everything else is refused.

ClickHouse's read-only mode is not enough. Inside a process (chDB) it lets ``file()`` read any file, ``INTO OUTFILE``
write one and ``python()`` see the process. ``merge('system', '.*')`` reads every table. So the statement is parsed by
sqlglot, written out again from the syntax tree, and the engine gets that text. A part of the tree that is not in one
of the lists below is refused, also where it is harmless.

The second check is ClickHouse's own: ``store/schema/reader.sql`` makes a user with SELECT on these tables alone.
"""

from __future__ import annotations

import asyncio
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

from stream_fabric.errors import BadRequest, StreamGwError
from telemetry.ask.sql.names import FUNCTIONS, KEYWORDS_BEFORE_PARENTHESIS, TABLE_FUNCTIONS, TABLES, TYPES

SQL_CHARS_MAX = 20_000
TOKENS_MAX = 2_500
DEPTH_MAX = 24
"""Maximum nesting of parentheses, brackets, braces and CASE; bounds the parser's stack."""
PREFIXES_MAX = 24
"""Maximum operators before one operand, as in NOT NOT NOT x."""
CHECK_S_MAX = 5.0
"""Maximum time of one check in seconds, including the wait for the checks before it."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_OPENS = (TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.L_BRACE, TokenType.CASE)
_CLOSES = (TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.R_BRACE, TokenType.END)
_PREFIXES = (TokenType.NOT, TokenType.DASH, TokenType.PLUS, TokenType.TILDE, TokenType.INTERVAL)
_STRANGE_STRINGS = (TokenType.HEREDOC_STRING, TokenType.RAW_STRING, TokenType.NATIONAL_STRING, TokenType.UNICODE_STRING)
_SETS = (exp.Union, exp.Intersect, exp.Except)

_SELECT_CLAUSES = (
    "with_", "expressions", "distinct", "from_", "joins", "prewhere", "where", "group", "having", "qualify", "windows",
    "order", "limit", "offset",
)  # fmt: skip
_SET_CLAUSES = ("with_", "this", "expression", "distinct", "order", "limit", "offset")
_CLAUSES: dict[type[exp.Expr], frozenset[str]] = {
    exp.Select: frozenset(_SELECT_CLAUSES),
    exp.Union: frozenset(_SET_CLAUSES),
    exp.Intersect: frozenset(_SET_CLAUSES),
    exp.Except: frozenset(_SET_CLAUSES),
    exp.Subquery: frozenset(("this", "alias")),
    exp.With: frozenset(("expressions",)),
    exp.CTE: frozenset(("this", "alias", "scalar")),
    exp.Table: frozenset(("this", "alias", "sample")),
    exp.TableAlias: frozenset(("this",)),
    exp.Join: frozenset(["this", "expressions", "kind", "side", "method", "on", "using", "global_"]),
    exp.Limit: frozenset(("expression", "expressions")),
    exp.In: frozenset(("this", "expressions", "query", "field", "is_global")),
}
"""Parts of a query with the clauses that each may have: no SETTINGS, FORMAT, INTO, hints or recursion."""

_PARTS = (
    exp.From, exp.Where, exp.PreWhere, exp.Group, exp.Cube, exp.Rollup, exp.GroupingSets, exp.Having, exp.Qualify,
    exp.Order, exp.Ordered, exp.WithFill, exp.Offset, exp.Distinct, exp.Final, exp.TableSample, exp.Window,
    exp.WindowSpec, exp.Filter,
    exp.Identifier, exp.Column, exp.Star, exp.Alias, exp.Literal, exp.HexString, exp.Boolean, exp.Null, exp.Var,
    exp.Paren, exp.Tuple, exp.Array, exp.Bracket, exp.Dot, exp.Lambda, exp.Case, exp.If, exp.Interval,
    exp.DataType, exp.DataTypeParam, exp.JSONPath, exp.JSONPathRoot, exp.JSONPathKey, exp.JSONPathSubscript,
    exp.Neg, exp.Not, exp.And, exp.Or, exp.EQ, exp.NEQ, exp.NullSafeEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Is,
    exp.Between, exp.Like, exp.ILike, exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Mod, exp.DPipe, exp.Exists,
    exp.Func,
)  # fmt: skip
"""The other kinds of node. Functions are checked by their names in the text that the engine gets."""


class CheckTimedOut(StreamGwError):
    """The check of a statement took too long, or others are before it."""

    code = "sql_check_timed_out"
    http_status = 503
    close_code = 1013
    retriable = True


# It warns of statements that are refused here anyway
logging.getLogger("sqlglot").setLevel(logging.ERROR)
_checks = ThreadPoolExecutor(1, thread_name_prefix="sql-check")


async def check_sql(text: str) -> str:
    """Check a statement outside the event loop, and return the text to run.

    Raises BadRequest with the part that is refused, and CheckTimedOut after ``CHECK_S_MAX``.
    """
    _check_length(text)
    try:
        async with asyncio.timeout(CHECK_S_MAX):
            return await asyncio.get_running_loop().run_in_executor(_checks, checked, text)
    except TimeoutError:
        raise CheckTimedOut(f"the SQL check took over {CHECK_S_MAX:g} s; simplify the query or retry in 5 s") from None


def checked(text: str) -> str:
    """Check a statement and return the text to run, written from its syntax tree. Raises BadRequest."""
    _check_length(text)
    try:
        # Parsed twice: what is checked is exactly what this text means
        sent = _write_sql(_parse(text))
        tree = _parse(sent)
        if _write_sql(tree) != sent:
            raise BadRequest("the query reads differently once written out; simplify it")
        _check_query(tree, frozenset())
        _check_calls(_tokenize(sent))
    except RecursionError:
        raise BadRequest("the query is nested too deeply") from None
    return sent


def _check_length(text: str) -> None:
    if len(text) > SQL_CHARS_MAX:
        raise BadRequest(f"the query has {len(text)} characters; the limit is {SQL_CHARS_MAX}")


def _write_sql(tree: exp.Expr) -> str:
    return tree.sql(dialect="clickhouse", comments=False)


def _parse(text: str) -> exp.Expr:
    _check_size(_tokenize(text))
    try:
        statements = [statement for statement in sqlglot.parse(text, dialect="clickhouse") if statement is not None]
    except SqlglotError as error:
        message = str(error).partition("\n")[0].rstrip(".")
        raise BadRequest(f"the query cannot be parsed: {message}"[:300]) from None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # The parser raises these for some malformed statements
        raise BadRequest(f"the query cannot be parsed: {type(error).__name__}") from None
    if not statements:
        raise BadRequest("the query is empty")
    if len(statements) > 1:
        raise BadRequest("send one statement; there is another after the semicolon")
    if not isinstance(statements[0], (exp.Select, *_SETS)):
        raise BadRequest(f"only SELECT and WITH … SELECT may run here, not {statements[0].key.upper()}")
    return statements[0]


def _tokenize(text: str) -> list[Token]:
    try:
        return sqlglot.tokenize(text, dialect="clickhouse")
    except SqlglotError as error:
        raise BadRequest(f"the query cannot be read: {error}"[:300]) from None


def _check_size(tokens: list[Token]) -> None:
    """Refuse a text that would cost the parser too much time or stack."""
    if len(tokens) > TOKENS_MAX:
        raise BadRequest(f"the query has {len(tokens)} words and signs; the limit is {TOKENS_MAX}")
    depth = prefixes = 0
    before = None
    for token in tokens:
        kind = token.token_type
        if kind in _STRANGE_STRINGS:
            raise BadRequest("write strings in single quotes; other forms may not be used here")
        if before is TokenType.USING and kind is not TokenType.L_PAREN:
            raise BadRequest("write USING with parentheses: USING (column)")
        before = kind
        depth += (kind in _OPENS) - (kind in _CLOSES)
        prefixes = prefixes + 1 if kind in _PREFIXES else 0
        if depth > DEPTH_MAX or prefixes > PREFIXES_MAX:
            raise BadRequest(f"the query is nested too deeply; the limit is {DEPTH_MAX} levels")


def _check_query(node: exp.Expr, in_scope: frozenset[str]) -> None:
    """Check a node and everything below it. ``in_scope``: names of CTEs that may be read as tables here."""
    if type(node) in _CLAUSES:
        _check_clauses(node)
    elif not isinstance(node, _PARTS):
        raise BadRequest(f"{node.key.upper()} may not be used in a query here")
    match node:
        case exp.Identifier() | exp.Var():
            _check_name(str(node.this))
        case exp.Table():
            _check_table(node, in_scope)
        case exp.In():
            _check_in(node, in_scope)
        case exp.Select() | exp.Union() | exp.Intersect() | exp.Except():
            in_scope = _check_with(node, in_scope)
    for child in node.iter_expressions():
        if not isinstance(child, exp.With):
            _check_query(child, in_scope)


def _check_with(query: exp.Expr, in_scope: frozenset[str]) -> frozenset[str]:
    """Check the CTEs of a query, and return the names that are in scope behind them.

    A CTE's own name is not in scope inside it: there it means the table.
    """
    clause = query.args.get("with_")
    if clause is None:
        return in_scope
    _check_clauses(clause)
    for cte in clause.expressions:
        _check_query(cte, in_scope)
        if isinstance(cte.this, (exp.Select, *_SETS)):
            in_scope |= {cte.alias}
        elif cte.alias in in_scope:
            raise BadRequest(f"{cte.alias[:60]} is the name of a query already; choose another name for the value")
    return in_scope


def _check_clauses(part: exp.Expr) -> None:
    for name, value in part.args.items():
        if value and name not in _CLAUSES[type(part)]:
            if name in ("db", "catalog"):
                raise BadRequest(f"write the table without its database: {part.sql('clickhouse')[:60]}")
            raise BadRequest(f"{name.strip('_').upper()} may not be used in a query here")


def _check_table(table: exp.Table, in_scope: frozenset[str]) -> None:
    named = table.this
    if isinstance(named, exp.Func):
        function = str(named.this if isinstance(named, exp.Anonymous) else named.sql_name())
        if not isinstance(named, exp.Anonymous | exp.GenerateSeries) or function.lower() not in TABLE_FUNCTIONS:
            raise BadRequest(
                f"the table function {function[:60]} may not be used here; there are "
                f"{', '.join(sorted(TABLE_FUNCTIONS))}"
            )
    elif not isinstance(named, exp.Identifier) or named.name not in TABLES | in_scope:
        raise BadRequest(f"there is no table {table.name[:60]!r} to query; there are {', '.join(sorted(TABLES))}")


def _check_in(node: exp.In, in_scope: frozenset[str]) -> None:
    """Refuse a table name on the right of IN, unless it may be read: ``IN x`` and ``IN (x)`` read the table x."""
    field, items = node.args.get("field"), node.expressions
    if field is None and len(items) != 1:
        return
    item = field if field is not None else items[0]
    while isinstance(item, exp.Paren | exp.Alias):
        item = item.this
    if isinstance(item, exp.Column):
        if not item.table and item.name in TABLES | in_scope:
            return
        raise BadRequest(
            f"IN takes a list, a subquery or a table; {item.sql('clickhouse')[:60]!r} is none of the tables to query"
        )
    if isinstance(item, exp.Dot | exp.Identifier | exp.Var | exp.Table) or (
        field is not None and not isinstance(item, exp.Tuple | exp.Array | exp.Subquery | exp.Literal)
    ):
        raise BadRequest("IN takes a list, a subquery or a table")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise BadRequest(f"the name {name[:60]!r} may not be used here: letters, digits and _ only, at most 128")


def _check_calls(tokens: list[Token]) -> None:
    """Check every function that the text calls."""
    for token, following in pairwise(tokens):
        if following.token_type is not TokenType.L_PAREN or not _NAME.fullmatch(token.text):
            continue
        if token.token_type is TokenType.STRING:
            continue
        word = token.text.lower()
        if FUNCTIONS.fullmatch(word) or word in TABLE_FUNCTIONS:
            continue
        if token.token_type is not TokenType.IDENTIFIER and word in KEYWORDS_BEFORE_PARENTHESIS | TYPES:
            continue
        raise BadRequest(f"the function {token.text[:60]} may not be called here")
