/* The module: python.py says what each function does. A result is one allocation: its size is counted first, and then
   its bytes are written. Nothing is kept between two calls. */

#include "native.h"

static PyMethodDef functions[] = {
    {"split_message", split_message, METH_O, NULL},
    {"text_event", (PyCFunction)(void (*)(void))text_event, METH_FASTCALL, NULL},
    {"chunk", chunk, METH_O, NULL},
    {"text_frame", (PyCFunction)(void (*)(void))text_frame, METH_FASTCALL, NULL},
    {"read_chunk", (PyCFunction)(void (*)(void))read_chunk, METH_FASTCALL, NULL},
    {"pack_command", pack_command, METH_O, NULL},
    {"json_counts", (PyCFunction)(void (*)(void))json_counts, METH_FASTCALL, NULL},
    {"may_hold_url", may_hold_url, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", NULL, 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&module);
}
