"""An analyst's own SQL: reads of our tables, and nothing else.

The engine's read-only mode is one wall. It is not enough: inside a process (chDB) it lets ``file()`` as a function read
any file, ``INTO OUTFILE`` write one, ``DESCRIBE url()`` call out, ``python()`` see the process, and runs what follows a
semicolon. So before it stands this one: the text is cut into ClickHouse's tokens, what is not on the list is refused,
and the engine gets the tokens that were checked, not the text. Pure.
"""

from __future__ import annotations

import re

from stream_fabric.errors import BadRequest

SQL_CHARS_MAX = 20_000


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TABLES = _words(
    "requests attempts fleet requests_minute attempts_minute usage_hour lengths_hour speeds_hour "
    "replicas_latest ingest_state numbers"
)

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<comment>--[^\n]*|/\*.*?\*/|\#[ !][^\n]*)
    |(?P<string>'(?:[^'\\]|\\.|'')*')
    |(?P<quoted>`[A-Za-z_]\w*`|"[A-Za-z_]\w*")
    |(?P<number>0[xX][0-9a-fA-F]+|\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)
    |(?P<word>[A-Za-z_]\w*)
    |(?P<sign>->|<=>|::|\|\||<=|>=|!=|<>|==|[-+*/%=<>(),.;\[\]?:])""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)

_WORDS_REFUSED = _words(
    "into outfile infile settings format insert update delete alter create drop truncate attach detach "
    "rename optimize system grant revoke set use kill explain exchange undrop backup restore move check "
    "execute watch parallel"
)
"""As a word of its own, wherever it stands."""

_BEFORE_PARENTHESIS = _words(
    "select from join where prewhere having on using in and or not as by then else when exists any all "
    "like ilike between distinct over limit offset with union except intersect array left right inner "
    "full cross asof semi anti global interval case order group is within filter qualify top fill step"
)
"""Keywords that a parenthesis may follow; it calls nothing there."""

_TYPES = _words(
    "array tuple map nullable lowcardinality decimal decimal32 decimal64 decimal128 datetime datetime64 "
    "fixedstring enum8 enum16"
)

_TABLE_FUNCTIONS = _words("numbers zeros values generateseries generate_series view")

_FUNCTIONS = re.compile(
    # Aggregates, with their combinators
    r"(count|sum|min|max|avg|any|anylast|argmin|argmax|median|quantile|quantiles|uniq|topk|grouparray|groupuniqarray|"
    r"stddev|var|covar|corr|skew|kurt|entropy|simplelinearregression|histogram|bounding|lag|lead|first_value|last_value|"
    r"rank|dense_rank|row_number|percent_rank|ntile|nth_value|deltasum|exponential|sequencecount|windowfunnel|retention)"
    r"(exact|low|high|inclusive|exclusive|timing|weighted|tdigest|bfloat16|deterministic|dd|gk|interpolated|combined|hll12|"
    r"theta|kahan|withoverflow|map|count|sum|insertat|movingavg|movingsum|sample|sorted|last|pop|samp|stable|matrix|heavy|"
    r"if|array|foreach|distinct|ordefault|ornull|merge|state|simplestate|resample|argmin|argmax|inframe|upto|timestamp|\d)*|"
    # Arithmetic, comparison, conditions
    r"abs|plus|minus|multiply|divide|intdiv|intdivorzero|modulo|positivemodulo|negate|gcd|lcm|greatest|least|clamp|if|multiif|"
    r"equals|notequals|less|greater|lessorequals|greaterorequals|between|round|floor|ceil|ceiling|trunc|truncate|roundbankers|"
    r"exp|exp2|exp10|log|log2|log10|ln|sqrt|cbrt|pow|power|sign|pi|sin|cos|tan|isnan|isfinite|isinfinite|ifnotfinite|"
    r"bit(and|or|xor|not|shiftleft|shiftright|test|count)|bar|width_?bucket|"
    r"isnull|isnotnull|ifnull|nullif|coalesce|assumenotnull|tonullable|"
    # Conversions and times
    r"cast|to(u?int(8|16|32|64|128)|float(32|64)|decimal(32|64|128)|string|date|date32|datetime|datetime32|datetime64|bool|"
    r"lowcardinality|fixedstring|typename|columntypename)(ornull|orzero|ordefault)?|"
    r"to(startof\w+|interval\w+|year|month|week|dayof\w+|hour|minute|second|millisecond|microsecond|yyyymm\w*|unixtimestamp\w*|"
    r"timezone|monday|relative\w+num|lastdayofmonth|quarter|isoweek|isoyear|time)|(from|to)unixtimestamp\w*|now|now64|today|"
    r"yesterday|date_?diff|date_?trunc|date_?add|date_?sub|add(years|months|weeks|days|hours|minutes|seconds|milliseconds|microseconds)|"
    r"subtract(years|months|weeks|days|hours|minutes|seconds|milliseconds|microseconds)|age|formatdatetime|datename|timeslots?|"
    r"parsedatetime\w*|makedate\w*|extract|"
    # Strings, arrays, maps, tuples, JSON
    r"length|lengthutf8|char_length|lower|upper|lcase|ucase|reverse|concat|substring|substr|mid|left|right|trim(both|left|right)?|ltrim|rtrim|"
    r"startswith|endswith|position\w*|locate|match|like|ilike|notlike|notilike|replace(all|one|regexpall|regexpone)?|"
    r"splitby(char|string|regexp|whitespace)|arraystringconcat|leftpad|rightpad|hex|unhex|crc32|cityhash64|siphash64|xxhash64|"
    r"formatreadable(size|quantity|timedelta|decimalsize)|format|empty|notempty|"
    r"array|array(all|any|avg|compact|concat|count|cumsum|difference|distinct|element|enumerate|exists|filter|first|firstindex|flatten|"
    r"intersect|join|last|lastindex|map|max|min|popback|popfront|product|pushback|pushfront|reduce|resize|reverse|reversesort|"
    r"slice|sort|sum|uniq|zip)|has|hasall|hasany|indexof|range|in|notin|tuple|tupleelement|untuple|map|mapkeys|mapvalues|"
    r"mapcontains|mapfromarrays|jsonextract(string|int|uint|float|bool|raw|arrayraw|keys|keysandvalues)?|jsonhas|jsonlength|"
    r"finalizeaggregation|runningdifference|identity|materialize|grouping|row_number|columns|exists|ignore|tojsonstring"
)


_ENDS_FROM = _words("where prewhere group order having limit offset union except intersect window qualify select")
_COLUMNS_OF_TUPLES = frozenset(("scores", "figures"))

Token = tuple[str, str]


def checked(text: str) -> str:
    """The statement as it may run. Raises BadRequest that names what may not."""
    tokens = _tokens(text)
    if tokens and tokens[-1][1] == ";":
        tokens.pop()
    if not tokens:
        raise BadRequest("there is no statement")
    if _word(tokens[0]) not in ("select", "with"):
        raise BadRequest(f"only SELECT (and WITH … SELECT) runs here, not {tokens[0][1][:40]}")
    named = _named(tokens)
    tables = TABLES | named
    in_from = [False]
    """Of each open parenthesis, whether what a comma separates are tables."""
    wants_table = False
    for at, token in enumerate(tokens):
        word, before = _word(token), _word(tokens[at - 1]) if at else ""
        after = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        if token[1] == ";":
            raise BadRequest("one statement at a time: there is something behind the semicolon")
        if wants_table and token[1] != "(":
            if word not in tables and not (word in _TABLE_FUNCTIONS and after == "("):
                raise BadRequest(f"there is no table {token[1][:60]} to ask; there are {', '.join(sorted(TABLES))}")
            if after == ".":
                raise BadRequest("a table is named without its database")
        elif word:
            _check_word(token, word, after, tables)
        wants_table = False
        match token[1].lower():
            case "(":
                in_from.append(False)
            case ")":
                in_from.pop()
                if not in_from:
                    raise BadRequest("a parenthesis is closed that was not open")
            case "," if in_from[-1]:
                wants_table = True
            case "from":
                in_from[-1] = wants_table = True
            case "join":
                in_from[-1] = wants_table = before != "array"
            case "using":
                if after != "(":
                    raise BadRequest("write USING with parentheses")
            case other if other in _ENDS_FROM:
                in_from[-1] = False
    return " ".join(value for _, value in tokens)


def _check_word(token: Token, word: str, after: str, tables: frozenset[str]) -> None:
    if after == "(":
        if (token[0] == "word" and word in _BEFORE_PARENTHESIS) or word in _TYPES:
            return
        if not _FUNCTIONS.fullmatch(word):
            raise BadRequest(f"the function {token[1][:60]} may not be called here")
    elif token[0] == "word" and word in _WORDS_REFUSED:
        raise BadRequest(f"{token[1].upper()} may not stand in a query here")
    elif after == "." and word not in tables and word not in _COLUMNS_OF_TUPLES:
        raise BadRequest(f"{token[1][:60]} is no table of the query; name an alias with AS")


def _named(tokens: list[Token]) -> frozenset[str]:
    """What the query itself gives a name: WITH name AS (…), … AS name."""
    found = set()
    for at, token in enumerate(tokens[:-1]):
        if _word(token) != "as" or not at:
            continue
        following, earlier = tokens[at + 1], tokens[at - 1]
        if following[1] == "(":
            found.add(_word(earlier))
        elif _word(following):
            found.add(_word(following))
    return frozenset(found - {""})


def _word(token: Token) -> str:
    """In lower case, without its quotes; empty: it is no word."""
    return token[1].strip('`"').lower() if token[0] in ("word", "quoted") else ""


def _tokens(text: str) -> list[Token]:
    if len(text) > SQL_CHARS_MAX:
        raise BadRequest(f"the query has {len(text)} characters, at most {SQL_CHARS_MAX} are taken")
    found: list[Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise BadRequest(f"what stands at character {at + 1} is not understood: {text[at : at + 20]!r}")
        at = match.end()
        kind = match.lastgroup
        assert kind is not None
        if kind not in ("space", "comment"):
            found.append((kind, match[0]))
    return found
