/* Helpers of the functions in this folder. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define DIGITS_MAX 20 /* of a number of 64 bits, with its sign */

static inline Py_ssize_t
width(unsigned long long value)
{
    Py_ssize_t digits = 1;
    for (; value >= 10; value /= 10)
        digits++;
    return digits;
}

static inline char *
put(char *to, const char *bytes, Py_ssize_t size)
{
    memcpy(to, bytes, (size_t)size);
    return to + size;
}

static inline char *
put_number(char *to, unsigned long long value)
{
    char *end = to + width(value);
    for (char *at = end; at > to; value /= 10)
        *--at = (char)('0' + value % 10);
    return end;
}

#define LONG_BYTES (64 << 10) /* takes longer than other threads should wait */

/* Let other threads run while many bytes are read, which no other thread can change. Give the result to locked(). */
static inline PyThreadState *
unlocked(Py_ssize_t bytes)
{
    return bytes > LONG_BYTES ? PyEval_SaveThread() : NULL;
}

static inline void
locked(PyThreadState *thread)
{
    if (thread != NULL)
        PyEval_RestoreThread(thread);
}

/* A published message, and the event to a reader that it becomes (gateway). */
PyObject *split_message(PyObject *module, PyObject *payload);
PyObject *text_event(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *chunk(PyObject *module, PyObject *data);

/* A chunk of the engine, and the frame that it becomes (agent). */
PyObject *read_chunk(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *text_frame(PyObject *module, PyObject *const *args, Py_ssize_t count);

/* A command for Redis. */
PyObject *pack_command(PyObject *module, PyObject *args);

/* What a JSON text has, before it is decoded. */
PyObject *json_counts(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *may_hold_url(PyObject *module, PyObject *text);
