"""Names that an analyst's SQL may use: tables, functions, and keywords before a parenthesis. A table of constants."""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TABLES = _words(
    "requests attempts fleet requests_minute attempts_minute usage_hour lengths_hour speeds_hour "
    "replicas_latest ingest_state bills cost_hour ingest_progress"
)
"""Tables that a query may read. ``store/schema/reader.sql`` grants the same."""

TABLE_FUNCTIONS = _words("numbers zeros generateseries generate_series")

KEYWORDS_BEFORE_PARENTHESIS = _words(
    "select from join where prewhere having on using in and or not as by then else when exists any all "
    "like ilike between distinct over limit offset with union except intersect array left right inner "
    "full cross asof semi anti global interval case order group is within filter qualify top fill step"
)
"""Keywords that a parenthesis may follow without being a call."""

TYPES = _words(
    "array tuple map nullable lowcardinality decimal decimal32 decimal64 decimal128 datetime datetime64 "
    "fixedstring enum8 enum16"
)

FUNCTIONS = re.compile(
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
    r"slice|sort|sum|uniq|zip)|has|hasall|hasany|indexof|range|tuple|tupleelement|untuple|map|mapkeys|mapvalues|"
    r"mapcontains|mapfromarrays|jsonextract(string|int|uint|float|bool|raw|arrayraw|keys|keysandvalues)?|jsonhas|jsonlength|"
    r"finalizeaggregation|runningdifference|identity|materialize|grouping|row_number|columns|exists|ignore|tojsonstring"
)
