/* What a JSON text holds. */

#define _GNU_SOURCE /* memmem */
#include "native.h"

#include <stdbool.h>

#define LONG_DIGITS 64 /* digits of a number that takes a decoder long, as python.py's */

typedef struct {
    Py_ssize_t members, commas, slow, brackets, depth, deepest;
    Py_ssize_t digits; /* of the number that is being read */
    int matched;       /* how many characters of "0e000" came last */
} Counts;

/* Count one character outside of strings. */
static inline void
count_one(Counts *counts, char c)
{
    switch (c) {
    case '+': case '-': /* the sign of a number or of its exponent */
        return;
    case '0': case '1': case '2': case '3': case '4': case '5': case '6': case '7': case '8': case '9': case '.':
        if (++counts->digits == LONG_DIGITS) {
            counts->slow++;
            counts->digits = 0;
        }
        counts->matched = counts->matched < 2 ? 1 : counts->matched + 1;
        if (counts->matched == 5) {
            counts->slow++;
            counts->matched = 0;
        }
        return;
    case 'e': case 'E':
        counts->matched = counts->matched == 1 || counts->matched > 2 ? 2 : 0;
        counts->digits = 0;
        return;
    case ':':
        counts->members++;
        break;
    case ',':
        counts->commas++;
        break;
    case '[': case '{':
        counts->brackets++;
        if (++counts->depth > counts->deepest)
            counts->deepest = counts->depth;
        break;
    case ']': case '}':
        counts->brackets++;
        counts->depth--;
        break;
    }
    counts->digits = 0;
    counts->matched = 0;
}

/* The quote that ends a string whose text begins at ``at``; ``end``: none does. */
static const char *
string_end(const char *at, const char *end)
{
    for (const char *from = at;;) {
        const char *quote = memchr(from, '"', (size_t)(end - from));
        if (quote == NULL)
            return end;
        const char *before = quote;
        while (before > at && before[-1] == '\\')
            before--;
        if ((quote - before) % 2 == 0)
            return quote;
        from = quote + 1;
    }
}

/* Count what the text has outside of strings. Returns its quotes; more than ``quotes_max``: the count has ended. */
static Py_ssize_t
count_text(const char *c, const char *end, Py_ssize_t quotes_max, Counts *counts)
{
    Py_ssize_t quotes = 0;
    for (; c < end && quotes <= quotes_max; c++) {
        if (*c == '\\' && c + 1 < end && (c[1] == '\\' || c[1] == '"')) {
            c++; /* no JSON has this outside of strings */
        } else if (*c == '"') {
            c = string_end(c + 1, end);
            quotes += 1 + (c < end);
            if (c == end)
                break;
        } else {
            count_one(counts, *c);
        }
    }
    return quotes;
}

PyObject *
json_counts(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    char *at;
    Py_ssize_t size;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "json_counts takes 2 arguments");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[0], &at, &size) < 0)
        return NULL;
    const Py_ssize_t quotes_max = 2 * PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred())
        return NULL;
    Counts counts = {0};
    PyThreadState *thread = unlocked(size);
    const Py_ssize_t quotes = count_text(at, at + size, quotes_max, &counts);
    locked(thread);
    if (quotes > quotes_max)
        Py_RETURN_NONE;
    return Py_BuildValue("(nnnnn)", counts.members, counts.commas, counts.slow, counts.brackets, counts.deepest);
}

PyObject *
may_hold_url(PyObject *Py_UNUSED(module), PyObject *text)
{
    char *at;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(text, &at, &size) < 0)
        return NULL;
    PyThreadState *thread = unlocked(size);
    const char *end = at + size;
    bool found = memmem(at, (size_t)size, "_url\"", 5) != NULL;
    for (const char *from = at; !found;) {
        from = memchr(from, '\\', (size_t)(end - from));
        if (from == NULL)
            break;
        found = end - from > 5 && memcmp(from, "\\u00", 4) == 0 && from[4] >= '5' && from[4] <= '7';
        from++;
    }
    locked(thread);
    return PyBool_FromLong(found);
}
