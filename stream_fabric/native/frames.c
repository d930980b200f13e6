/* From an engine's chunk to a frame. */

#include "native.h"

#define COUNT_DIGITS_MAX 9

/* --- read_chunk ------------------------------------------------------------------------------------------------ */

/* Return a text that JSON may have between quotes as it is, or NULL; without an exception: it may not. */
static PyObject *
plain_text(const char *at, Py_ssize_t size)
{
    int is_ascii = 1;
    for (Py_ssize_t each = 0; each < size; each++) {
        unsigned char byte = (unsigned char)at[each];
        if (byte < 0x20 || byte == '\\' || byte == 0x7f)
            return NULL;
        is_ascii &= byte < 0x80;
    }
    PyObject *text = PyUnicode_DecodeUTF8(at, size, NULL);
    if (text == NULL) {
        if (PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))
            PyErr_Clear();
        return NULL;
    }
    for (Py_ssize_t each = 0; !is_ascii && each < PyUnicode_GET_LENGTH(text); each++)
        if (!Py_UNICODE_ISPRINTABLE(PyUnicode_READ_CHAR(text, each))) {
            Py_DECREF(text);
            return NULL;
        }
    return text;
}

/* Read a JSON number of few digits. -1: it is none. */
static long long
count_of(const char *at, const char *end)
{
    if (at >= end || end - at > COUNT_DIGITS_MAX || (*at == '0' && end - at > 1))
        return -1;
    long long value = 0;
    for (; at < end; at++) {
        if (*at < '0' || *at > '9')
            return -1;
        value = value * 10 + (*at - '0');
    }
    return value;
}

static int
begins_with(const char *at, const char *end, PyObject *bytes)
{
    return end - at >= PyBytes_GET_SIZE(bytes) &&
           memcmp(at, PyBytes_AS_STRING(bytes), (size_t)PyBytes_GET_SIZE(bytes)) == 0;
}

/* Find the needle, which is not empty; NULL: it is not there. */
static const char *
find(const char *at, const char *end, PyObject *needle)
{
    for (; end - at >= PyBytes_GET_SIZE(needle); at++) {
        at = memchr(at, PyBytes_AS_STRING(needle)[0], (size_t)(end - at - PyBytes_GET_SIZE(needle) + 1));
        if (at == NULL || begins_with(at, end, needle))
            return at;
    }
    return NULL;
}

/* Read the counts that stand where the form has them. -1: there are others. */
static long long
made_of(const char *at, const char *end, PyObject *between, long own)
{
    if (PyBytes_GET_SIZE(between) == 0)
        return own == 0 ? count_of(at, end) : -1;
    const char *stop = find(at, end, between);
    if (stop == NULL)
        return -1;
    long long first = count_of(at, stop), second = count_of(stop + PyBytes_GET_SIZE(between), end);
    return first < 0 || second < 0 ? -1 : own == 0 ? first : own == 1 ? second : -1;
}

PyObject *
read_chunk(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    int is_right = count == 6;
    for (Py_ssize_t arg = 0; is_right && arg < 6; arg++)
        is_right = arg == 4 ? PyLong_Check(args[arg]) : PyBytes_Check(args[arg]);
    if (!is_right) {
        PyErr_SetString(PyExc_TypeError, "read_chunk takes four bytes, a number and bytes");
        return NULL;
    }
    PyObject *head = args[0], *after = args[1], *between = args[2], *tail = args[3];
    long own = PyLong_AsLong(args[4]);
    if (own == -1 && PyErr_Occurred())
        return NULL;
    const char *at = PyBytes_AS_STRING(args[5]), *end = at + PyBytes_GET_SIZE(args[5]);
    if (!begins_with(at, end, head))
        Py_RETURN_NONE;
    const char *text = at + PyBytes_GET_SIZE(head);
    const char *quote = memchr(text, '"', (size_t)(end - text));
    if (quote == NULL || quote == text || !begins_with(quote, end, after))
        Py_RETURN_NONE;
    const char *counts = quote + PyBytes_GET_SIZE(after), *rest = end - PyBytes_GET_SIZE(tail);
    long long made = 0;
    if (own < 0) {
        if (counts != end)
            Py_RETURN_NONE;
    }
    else if (rest < counts || !begins_with(rest, end, tail) || (made = made_of(counts, rest, between, own)) < 0)
        Py_RETURN_NONE;
    PyObject *found = plain_text(text, quote - text);
    if (found == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    return own < 0 ? Py_BuildValue("(NO)", found, Py_None) : Py_BuildValue("(NL)", found, made);
}

/* --- text_frame ------------------------------------------------------------------------------------------------ */

/* Return how a byte is written in a JSON string: its number of bytes, and the letter after a backslash (0: none). */
static int
json_width(unsigned char byte, char *letter)
{
    const char *found;
    *letter = 0;
    if (byte >= 0x20 && byte != '"' && byte != '\\')
        return 1;
    if (byte && (found = memchr("\"\\\b\f\n\r\t", byte, 7)) != NULL) {
        *letter = "\"\\bfnrt"[found - "\"\\\b\f\n\r\t"];
        return 2;
    }
    return 6;
}

PyObject *
text_frame(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyUnicode_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "text_frame takes a number, a str and a number");
        return NULL;
    }
    unsigned long long block = PyLong_AsUnsignedLongLong(args[0]);
    unsigned long long tokens = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t length, size = 0;
    const char *text = PyUnicode_AsUTF8AndSize(args[1], &length);
    if (text == NULL)
        return NULL;
    char letter;
    for (Py_ssize_t at = 0; at < length; at++)
        size += json_width((unsigned char)text[at], &letter);
    int is_plain = size == length;
    size += 2 + width(block) + (tokens == 1 ? 0 : 1 + width(tokens));
    PyObject *frame = PyBytes_FromStringAndSize(NULL, size);
    if (frame == NULL)
        return NULL;
    char *to = put_number(PyBytes_AS_STRING(frame), block);
    if (tokens != 1) {
        *to++ = ':';
        to = put_number(to, tokens);
    }
    *to++ = '"';
    if (is_plain)
        to = put(to, text, length);
    else
        for (Py_ssize_t at = 0; at < length; at++) {
            unsigned char byte = (unsigned char)text[at];
            int wide = json_width(byte, &letter);
            if (wide == 1)
                *to++ = (char)byte;
            else if (wide == 2) {
                *to++ = '\\';
                *to++ = letter;
            }
            else {
                to = put(to, "\\u00", 4);
                *to++ = "0123456789abcdef"[byte >> 4];
                *to++ = "0123456789abcdef"[byte & 15];
            }
        }
    *to = '"';
    return frame;
}
