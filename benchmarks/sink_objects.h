/* What was written: objects, and uploads that are not completed yet. A joined object is the list of its parts, never a copy. */
#pragma once
#include <fcntl.h>

#include "sink_wire.h"

#define SMALL_BYTES (1 << 20)

static const char *kept_in; /* folder for large bodies; NULL: they are discarded, and read back as zeros */

struct part {
    int number;
    long size, tag;
    char *memory; /* content of a small one, with a zero after it */
    int fd;       /* content of a large one, -1 if it was discarded */
};

struct object {
    char *name; /* bucket/key */
    long id;    /* of the upload */
    long size, tag;
    time_t at;
    int holders, count;
    struct part *parts; /* in the order of their numbers */
};

struct table {
    struct object **items; /* in the order of their names */
    int count;
};

static struct table objects, uploads;
static pthread_mutex_t tables = PTHREAD_MUTEX_INITIALIZER;

static long new_tag(void) {
    static long tag;
    return __sync_add_and_fetch(&tag, 1);
}

static void part_free(struct part *part) {
    free(part->memory);
    if (part->fd >= 0) close(part->fd);
}

static bool write_all(int fd, const char *bytes, ssize_t size) {
    while (size) {
        ssize_t written = write(fd, bytes, (size_t)size);
        if (written <= 0) return false;
        bytes += written;
        size -= written;
    }
    return true;
}

static bool receive_small(struct part *part, struct body *body, long declared) {
    ssize_t got = 1;
    part->memory = calloc(1, (size_t)declared + 1);
    while (part->size < declared && (got = body_take(body, part->memory + part->size, (size_t)(declared - part->size))) > 0)
        part->size += got;
    return part->size == declared;
}

static bool receive_large(struct part *part, struct body *body) {
    char *block = NULL;
    ssize_t got;
    if (kept_in) {
        if ((part->fd = open(kept_in, O_TMPFILE | O_RDWR, 0600)) < 0) return false;
        block = malloc(BUFFER_BYTES);
    }
    while ((got = body_take(body, block, BUFFER_BYTES)) > 0) {
        part->size += got;
        if (block && !write_all(part->fd, block, got)) break;
    }
    free(block);
    return got == 0;
}

/* Receives a body of `declared` bytes (-1: unknown) into memory, a file without a name, or nowhere. */
static bool part_receive(struct part *part, struct body *body, long declared) {
    *part = (struct part){.fd = -1, .tag = new_tag()};
    bool is_small = declared >= 0 && declared <= SMALL_BYTES;
    return (is_small ? receive_small(part, body, declared) : receive_large(part, body)) && body_finish(body);
}

static bool part_send(struct wire *wire, const struct part *part, long offset, long size) {
    static const char zeros[BUFFER_BYTES];
    if (part->memory) return wire_send(wire, part->memory + offset, (size_t)size);
    if (part->fd >= 0) return wire_send_file(wire, part->fd, offset, (size_t)size);
    for (; size > BUFFER_BYTES; size -= BUFFER_BYTES)
        if (!wire_send(wire, zeros, BUFFER_BYTES)) return false;
    return wire_send(wire, zeros, (size_t)size);
}

static bool object_send(struct wire *wire, const struct object *object, long offset, long size) {
    for (int i = 0; i < object->count && size; i++) {
        const struct part *part = &object->parts[i];
        long here = offset < part->size ? SMALLER(size, part->size - offset) : 0;
        if (here && !part_send(wire, part, offset, here)) return false;
        offset = offset > part->size ? offset - part->size : 0;
        size -= here;
    }
    return true;
}

/* The functions below are called with `tables` locked. */

static struct object *object_new(const char *name) {
    struct object *object = calloc(1, sizeof *object);
    *object = (struct object){.name = strdup(name), .id = new_tag(), .at = time(NULL), .holders = 1};
    return object;
}

static void object_release(struct object *object) {
    if (--object->holders) return;
    for (int i = 0; i < object->count; i++) part_free(&object->parts[i]);
    free(object->parts);
    free(object->name);
    free(object);
}

static void object_add(struct object *object, struct part part) {
    int i = 0;
    while (i < object->count && object->parts[i].number < part.number) i++;
    if (i < object->count && object->parts[i].number == part.number) {
        part_free(&object->parts[i]);
    } else {
        object->parts = realloc(object->parts, (size_t)(object->count + 1) * sizeof part);
        memmove(object->parts + i + 1, object->parts + i, (size_t)(object->count++ - i) * sizeof part);
    }
    object->parts[i] = part;
    object->size = 0;
    for (i = 0; i < object->count; i++) object->size += object->parts[i].size;
    object->tag = part.tag;
}

/* Index of the first item whose name is not before `name`. */
static int table_at(const struct table *table, const char *name) {
    int low = 0, high = table->count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (strcmp(table->items[middle]->name, name) < 0) low = middle + 1;
        else high = middle;
    }
    return low;
}

static struct object *table_find(const struct table *table, const char *name) {
    int i = table_at(table, name);
    return i < table->count && !strcmp(table->items[i]->name, name) ? table->items[i] : NULL;
}

static struct object *upload_find(const char *name, long id) {
    for (int i = table_at(&uploads, name); i < uploads.count && !strcmp(uploads.items[i]->name, name); i++)
        if (uploads.items[i]->id == id) return uploads.items[i];
    return NULL;
}

static void table_insert(struct table *table, struct object *object) {
    int i = table_at(table, object->name);
    table->items = realloc(table->items, (size_t)(table->count + 1) * sizeof object);
    memmove(table->items + i + 1, table->items + i, (size_t)(table->count++ - i) * sizeof object);
    table->items[i] = object;
}

static void table_remove(struct table *table, struct object *object) {
    int i = table_at(table, object->name);
    while (table->items[i] != object) i++;
    memmove(table->items + i, table->items + i + 1, (size_t)(--table->count - i) * sizeof object);
}

static void object_delete(struct object *object) {
    if (!object) return;
    table_remove(&objects, object);
    object_release(object);
}

/* Makes an object visible in place of an older one; false: `only_if_absent`, and there is one. */
static bool object_publish(struct object *object, bool only_if_absent) {
    struct object *before = table_find(&objects, object->name);
    if (before && only_if_absent) return false;
    object_delete(before);
    table_insert(&objects, object);
    return true;
}
