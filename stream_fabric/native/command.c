/* Commands for Redis, as hiredis packs them. */

#include "native.h"

/* Get the bytes of an argument that is one of str or bytes. */
static int
bytes_of(PyObject *arg, const char **bytes, Py_ssize_t *size)
{
    if (PyBytes_Check(arg)) {
        *bytes = PyBytes_AS_STRING(arg);
        *size = PyBytes_GET_SIZE(arg);
        return 0;
    }
    *bytes = PyUnicode_AsUTF8AndSize(arg, size);
    return *bytes == NULL ? -1 : 0;
}

/* Return the arguments with every float and long number as a str; a new reference. */
static PyObject *
without_rare(PyObject *args)
{
    PyObject *out = PyTuple_New(PyTuple_GET_SIZE(args));
    for (Py_ssize_t at = 0; out != NULL && at < PyTuple_GET_SIZE(args); at++) {
        PyObject *arg = PyTuple_GET_ITEM(args, at);
        int overflow = 0;
        if (PyLong_CheckExact(arg) && PyLong_AsLongLongAndOverflow(arg, &overflow) == -1 && PyErr_Occurred())
            arg = NULL;
        else if (overflow || PyFloat_Check(arg))
            arg = PyObject_Repr(arg);
        else if (PyLong_CheckExact(arg) || PyUnicode_Check(arg) || PyBytes_Check(arg))
            Py_INCREF(arg);
        else {
            PyErr_SetString(PyExc_TypeError, "an argument of a command must be str, int, float or bytes");
            arg = NULL;
        }
        if (arg == NULL)
            Py_CLEAR(out);
        else
            PyTuple_SET_ITEM(out, at, arg);
    }
    return out;
}

/* Return the size of the packed command at most. -1: an argument is a rare one, or an exception is set. */
static Py_ssize_t
packed_size_max(PyObject *args)
{
    const Py_ssize_t around = 1 + DIGITS_MAX + 2 + 2; /* $<size>\r\n, and the \r\n after the argument */
    Py_ssize_t total = around;
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(args); at++) {
        PyObject *arg = PyTuple_GET_ITEM(args, at);
        Py_ssize_t size = DIGITS_MAX;
        const char *bytes;
        int overflow = 0;
        if (PyLong_CheckExact(arg)) {
            PyLong_AsLongLongAndOverflow(arg, &overflow);
            if (overflow)
                return -1;
        }
        else if (!PyBytes_Check(arg) && !PyUnicode_Check(arg))
            return -1;
        else if (bytes_of(arg, &bytes, &size) < 0)
            return -1;
        total += around + size;
    }
    return total;
}

static char *
put_argument(char *to, PyObject *arg)
{
    const char *bytes;
    Py_ssize_t size;
    char digits[DIGITS_MAX];
    if (PyLong_CheckExact(arg)) {
        long long value = PyLong_AsLongLong(arg);
        char *end = digits;
        if (value < 0)
            *end++ = '-';
        end = put_number(end, value < 0 ? 0ULL - (unsigned long long)value : (unsigned long long)value);
        bytes = digits;
        size = end - digits;
    }
    else
        bytes_of(arg, &bytes, &size); /* it has succeeded before, and a str keeps its UTF-8 */
    *to++ = '$';
    to = put(put_number(to, (unsigned long long)size), "\r\n", 2);
    return put(put(to, bytes, size), "\r\n", 2);
}

PyObject *
pack_command(PyObject *Py_UNUSED(module), PyObject *args)
{
    if (!PyTuple_Check(args)) {
        PyErr_SetString(PyExc_TypeError, "pack_command takes a tuple");
        return NULL;
    }
    PyObject *common = Py_NewRef(args), *out = NULL;
    Py_ssize_t size = packed_size_max(common);
    if (size < 0 && !PyErr_Occurred()) {
        Py_SETREF(common, without_rare(args));
        size = common == NULL ? -1 : packed_size_max(common);
    }
    if (size >= 0)
        out = PyBytes_FromStringAndSize(NULL, size);
    if (out != NULL) {
        char *to = PyBytes_AS_STRING(out);
        *to++ = '*';
        to = put(put_number(to, (unsigned long long)PyTuple_GET_SIZE(common)), "\r\n", 2);
        for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(common); at++)
            to = put_argument(to, PyTuple_GET_ITEM(common, at));
        _PyBytes_Resize(&out, to - PyBytes_AS_STRING(out));
    }
    Py_XDECREF(common);
    return out;
}
