/* From a published message to the bytes of a reader. */

#include "native.h"

#define SEQ_DIGITS_MAX 18 /* a seq of so many digits fits into 64 bits */

/* --- split_message --------------------------------------------------------------------------------------------- */

static PyObject *
seq_of(const char *at, const char *end)
{
    unsigned long long value = 0;
    int is_seq = at < end && end - at <= SEQ_DIGITS_MAX;
    for (; at < end; at++) {
        is_seq &= *at >= '0' && *at <= '9';
        value = value * 10 + (unsigned long long)(*at - '0');
    }
    if (is_seq)
        return PyLong_FromUnsignedLongLong(value);
    PyErr_SetString(PyExc_ValueError, "a part of a published message has no seq in digits");
    return NULL;
}

static PyObject *
part_of(const char *at, const char *end)
{
    const char *stop[4], *from = at;
    for (int field = 0; field < 4; field++) {
        stop[field] = memchr(from, 0x1f, (size_t)(end - from));
        if (stop[field] == NULL) {
            PyErr_SetString(PyExc_ValueError, "a part of a published message has fewer than 5 fields");
            return NULL;
        }
        from = stop[field] + 1;
    }
    PyObject *part = PyTuple_New(5);
    if (part == NULL)
        return NULL;
    PyTuple_SET_ITEM(part, 0, PyBytes_FromStringAndSize(at, stop[0] - at));
    PyTuple_SET_ITEM(part, 1, PyBytes_FromStringAndSize(stop[0] + 1, stop[1] - stop[0] - 1));
    PyTuple_SET_ITEM(part, 2, seq_of(stop[1] + 1, stop[2]));
    PyTuple_SET_ITEM(part, 3, seq_of(stop[2] + 1, stop[3]));
    PyTuple_SET_ITEM(part, 4, PyBytes_FromStringAndSize(from, end - from));
    for (int field = 0; field < 5; field++)
        if (PyTuple_GET_ITEM(part, field) == NULL) {
            Py_DECREF(part);
            return NULL;
        }
    return part;
}

PyObject *
split_message(PyObject *Py_UNUSED(module), PyObject *payload)
{
    char *at;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(payload, &at, &size) < 0)
        return NULL;
    PyObject *parts = PyList_New(0);
    if (parts == NULL)
        return NULL;
    for (const char *end = at + size;;) {
        const char *stop = memchr(at, 0x1e, (size_t)(end - at));
        PyObject *part = part_of(at, stop == NULL ? end : stop);
        if (part == NULL || PyList_Append(parts, part) < 0) {
            Py_XDECREF(part);
            Py_DECREF(parts);
            return NULL;
        }
        Py_DECREF(part);
        if (stop == NULL)
            return parts;
        at = (char *)stop + 1;
    }
}

/* --- text_event ------------------------------------------------------------------------------------------------ */

/* The parts around the text of a line's block; borrowed. NULL without an exception: there are none. */
static PyObject *
parts_around(PyObject *blocks, const char *line, const char *quote)
{
    PyObject *number = PyBytes_FromStringAndSize(line, quote - line);
    if (number == NULL)
        return NULL;
    PyObject *around = PyDict_GetItemWithError(blocks, number);
    Py_DECREF(number);
    if (around == NULL)
        return NULL;
    if (!PyTuple_Check(around)) {
        PyErr_SetString(PyExc_TypeError, "the parts around a text are no tuple");
        return NULL;
    }
    for (Py_ssize_t part = 0; part < PyTuple_GET_SIZE(around); part++)
        if (!PyBytes_Check(PyTuple_GET_ITEM(around, part))) {
            PyErr_SetString(PyExc_TypeError, "a part around a text is no bytes");
            return NULL;
        }
    return PyTuple_GET_SIZE(around) ? around : NULL;
}

PyObject *
text_event(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 5 || !PyBytes_Check(args[0]) || !PyDict_Check(args[1]) || !PyBytes_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "text_event takes bytes, a dict, bytes and two numbers");
        return NULL;
    }
    const char *line = PyBytes_AS_STRING(args[2]), *end = line + PyBytes_GET_SIZE(args[2]);
    unsigned long long epoch = PyLong_AsUnsignedLongLong(args[3]);
    unsigned long long seq = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    const char *quote = memchr(line, '"', (size_t)(end - line));
    PyObject *around = quote == NULL ? NULL : parts_around(args[1], line, quote);
    if (around == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    const char *text = quote + 1;
    Py_ssize_t parts = PyTuple_GET_SIZE(around);
    Py_ssize_t size = PyBytes_GET_SIZE(args[0]) + (end - text) * (parts - 1);
    size += 8 + width(epoch) + width(seq); /* 8: the constants around these two */
    for (Py_ssize_t part = 0; part < parts; part++)
        size += PyBytes_GET_SIZE(PyTuple_GET_ITEM(around, part));
    PyObject *event = PyBytes_FromStringAndSize(NULL, size);
    if (event == NULL)
        return NULL;
    char *to = put(PyBytes_AS_STRING(event), PyBytes_AS_STRING(args[0]), PyBytes_GET_SIZE(args[0]));
    for (Py_ssize_t part = 0; part < parts; part++) {
        PyObject *constant = PyTuple_GET_ITEM(around, part);
        if (part)
            to = put(to, text, end - text);
        to = put(to, PyBytes_AS_STRING(constant), PyBytes_GET_SIZE(constant));
    }
    to = put_number(put(to, "\nid: ", 5), epoch);
    *to++ = '-';
    put(put_number(to, seq), "\n\n", 2);
    return event;
}

/* --- chunk ----------------------------------------------------------------------------------------------------- */

PyObject *
chunk(PyObject *Py_UNUSED(module), PyObject *data)
{
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(data, &bytes, &size) < 0)
        return NULL;
    int digits = 1;
    for (Py_ssize_t rest = size >> 4; rest; rest >>= 4)
        digits++;
    PyObject *out = PyBytes_FromStringAndSize(NULL, digits + size + 4);
    if (out == NULL)
        return NULL;
    char *to = PyBytes_AS_STRING(out);
    for (int digit = digits; digit--;)
        *to++ = "0123456789abcdef"[(size >> (4 * digit)) & 15];
    put(put(put(to, "\r\n", 2), bytes, size), "\r\n", 2);
    return out;
}
