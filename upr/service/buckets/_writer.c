/* Thread that writes the records of a journal, without the interpreter lock: what Journal._write of journal.py does, which is the
reference. A thread of Python waits for that lock before each step, beside bulk writes for longer than the disk takes.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* As in journal.py: what one call of Linux takes. */
enum { PIECES_MAX = 1024 };

typedef enum { IDLE, ASKED, WRITTEN } State;

typedef struct {
    PyObject_HEAD
    pthread_t thread;
    int has_thread;
    pthread_mutex_t lock;
    pthread_cond_t asked;
    State state;
    int ending;
    int event;
    char *folder;
    /* The record: its pieces, which are kept, where they lie, and to where they go. */
    PyObject *pieces;
    struct iovec *parts;
    Py_ssize_t part_count;
    int fd;
    off_t at;
    /* What became of it. */
    int error;
    double seconds;
    int64_t folder_time;
} Writer;

/* The thread. It looks at nothing of Python's but the bytes of the record. */

static double
now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

/* Write all of the record, also where a call takes less of it, as on a nearly full disk. Return an errno, 0 for none. */
static int
write_whole(Writer *self)
{
    struct iovec *part = self->parts, *end = part + self->part_count;
    off_t at = self->at;
    while (part < end) {
        int count = end - part < PIECES_MAX ? (int)(end - part) : PIECES_MAX;
        ssize_t written = pwritev(self->fd, part, count, at);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written <= 0) {
            return written < 0 ? errno : EIO;
        }
        at += written;
        for (; part < end && (size_t)written >= part->iov_len; part++) {
            written -= (ssize_t)part->iov_len;
        }
        if (written > 0) {
            part->iov_base = (char *)part->iov_base + written;
            part->iov_len -= (size_t)written;
        }
    }
    return 0;
}

static void
write_record(Writer *self)
{
    double began = now();
    self->error = write_whole(self);
    self->seconds = now() - began;
    struct stat found;
    self->folder_time = -1;
    if (stat(self->folder, &found) == 0) {
        self->folder_time = found.st_mtim.tv_sec * INT64_C(1000000000) + found.st_mtim.tv_nsec;
    }
}

static void *
run(void *argument)
{
    Writer *self = argument;
    pthread_mutex_lock(&self->lock);
    while (self->state == ASKED || !self->ending) {
        if (self->state != ASKED) {
            pthread_cond_wait(&self->asked, &self->lock);
            continue;
        }
        pthread_mutex_unlock(&self->lock);
        write_record(self);
        pthread_mutex_lock(&self->lock);
        self->state = WRITTEN;
        uint64_t one = 1;
        while (write(self->event, &one, sizeof one) < 0 && errno == EINTR) {
        }
    }
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

/* The type. */

static void
forget_record(Writer *self)
{
    Py_CLEAR(self->pieces);
    PyMem_RawFree(self->parts);
    self->parts = NULL;
    self->part_count = 0;
}

static void
end_thread(Writer *self)
{
    if (!self->has_thread) {
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&self->lock);
    self->ending = 1;
    pthread_cond_signal(&self->asked);
    pthread_mutex_unlock(&self->lock);
    pthread_join(self->thread, NULL);
    Py_END_ALLOW_THREADS
    self->has_thread = 0;
}

static PyObject *
writer_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    PyObject *folder;
    static char *names[] = {"", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, named, "O&", names, PyUnicode_FSConverter, &folder)) {
        return NULL;
    }
    Writer *self = (Writer *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_DECREF(folder);
        return NULL;
    }
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->asked, NULL);
    self->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (self->event < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
    } else if ((self->folder = PyMem_RawMalloc(PyBytes_GET_SIZE(folder) + 1)) == NULL) {
        PyErr_NoMemory();
    } else {
        memcpy(self->folder, PyBytes_AS_STRING(folder), PyBytes_GET_SIZE(folder) + 1);
    }
    Py_DECREF(folder);
    if (self->folder == NULL) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void
writer_dealloc(PyObject *object)
{
    Writer *self = (Writer *)object;
    PyTypeObject *type = Py_TYPE(object);
    end_thread(self);
    forget_record(self);
    if (self->event >= 0) {
        close(self->event);
    }
    PyMem_RawFree(self->folder);
    pthread_cond_destroy(&self->asked);
    pthread_mutex_destroy(&self->lock);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *
writer_fileno(PyObject *object, PyObject *nothing)
{
    return PyLong_FromLong(((Writer *)object)->event);
}

PyDoc_STRVAR(write_doc, "write(fd, pieces, at)\n\nHave a tuple of bytes written to a file from an offset on. One record at a time.");

static PyObject *
writer_write(PyObject *object, PyObject *args)
{
    Writer *self = (Writer *)object;
    int fd;
    PyObject *pieces;
    long long at;
    if (!PyArg_ParseTuple(args, "iO!L", &fd, &PyTuple_Type, &pieces, &at)) {
        return NULL;
    }
    if (self->pieces != NULL || self->ending) {
        PyErr_SetString(PyExc_RuntimeError, "a record is being written, or the writer is closed");
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(pieces);
    struct iovec *parts = PyMem_RawCalloc(count + 1, sizeof *parts);
    if (parts == NULL) {
        return PyErr_NoMemory();
    }
    self->part_count = 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *piece = PyTuple_GET_ITEM(pieces, index);
        if (!PyBytes_CheckExact(piece)) {
            PyMem_RawFree(parts);
            PyErr_SetString(PyExc_TypeError, "the pieces of a record must be bytes");
            return NULL;
        }
        if (PyBytes_GET_SIZE(piece)) {
            parts[self->part_count++] = (struct iovec){PyBytes_AS_STRING(piece), PyBytes_GET_SIZE(piece)};
        }
    }
    self->pieces = Py_NewRef(pieces);
    self->parts = parts;
    self->fd = fd, self->at = at;
    if (!self->has_thread) {
        int error = pthread_create(&self->thread, NULL, run, self);
        if (error) {
            forget_record(self);
            errno = error;
            return PyErr_SetFromErrno(PyExc_OSError);
        }
        self->has_thread = 1;
    }
    pthread_mutex_lock(&self->lock);
    self->state = ASKED;
    pthread_cond_signal(&self->asked);
    pthread_mutex_unlock(&self->lock);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(result_doc, "result()\n\n"
                         "Return what became of the record: an errno, 0 for none; what it took, in seconds; and when the folder was changed last,\n"
                         "in nanoseconds, -1 where it cannot be asked. None while the record is being written.");

static PyObject *
writer_result(PyObject *object, PyObject *nothing)
{
    Writer *self = (Writer *)object;
    pthread_mutex_lock(&self->lock);
    int written = self->state == WRITTEN;
    self->state = written ? IDLE : self->state;
    pthread_mutex_unlock(&self->lock);
    if (!written) {
        Py_RETURN_NONE;
    }
    uint64_t told;
    while (read(self->event, &told, sizeof told) < 0 && errno == EINTR) {
    }
    forget_record(self);
    return Py_BuildValue("(idL)", self->error, self->seconds, (long long)self->folder_time);
}

static PyObject *
writer_close(PyObject *object, PyObject *nothing)
{
    end_thread((Writer *)object);
    ((Writer *)object)->ending = 1;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"close", writer_close, METH_NOARGS, "close()\n\nWait for the record that is being written, and end the thread."},
    {"fileno", writer_fileno, METH_NOARGS, "fileno()\n\nReturn the descriptor that can be read once a record is written."},
    {"result", writer_result, METH_NOARGS, result_doc},
    {"write", writer_write, METH_VARARGS, write_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, "Writer(folder)\n\nThread that writes records, and looks when their folder was changed."},
    {Py_tp_new, writer_new},
    {Py_tp_dealloc, writer_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec type_spec = {
    .name = "upr.service.buckets._writer.Writer",
    .basicsize = sizeof(Writer),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = type_slots,
};

static int
add_type(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &type_spec, NULL);
    int status = type == NULL ? -1 : PyModule_AddObjectRef(module, "Writer", type);
    Py_XDECREF(type);
    return status;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_type}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "upr.service.buckets._writer",
    .m_doc = "Thread that writes the records of a journal.",
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__writer(void)
{
    return PyModuleDef_Init(&definition);
}
