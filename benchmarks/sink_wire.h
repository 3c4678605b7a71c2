/* A connection that may be TLS, and the bodies that arrive on it: plain, HTTP chunks, "aws-chunked", or one in the other. */
#pragma once
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define BUFFER_BYTES (256 << 10)
#define LINE_BYTES (16 << 10)
#define SMALLER(a, b) ((a) < (b) ? (a) : (b))

struct wire {
    int fd;
    SSL *tls; /* NULL: plain TCP */
    char *buffer;
    size_t at, end; /* what of the buffer was received and not taken yet */
};

static double bytes_per_s; /* 0: as fast as it comes */

/* Delays a receiver of `size` bytes until all connections together keep to the rate; TCP then slows the senders down. */
static void keep_to_rate(ssize_t size) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static double free_at_s;
    if (!bytes_per_s || size <= 0) return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double now_s = now.tv_sec + now.tv_nsec / 1e9;
    pthread_mutex_lock(&lock);
    free_at_s = (free_at_s > now_s ? free_at_s : now_s) + size / bytes_per_s;
    double wait_s = free_at_s - now_s;
    pthread_mutex_unlock(&lock);
    struct timespec wait = {(time_t)wait_s, (long)((wait_s - (time_t)wait_s) * 1e9)};
    nanosleep(&wait, NULL);
}

static ssize_t wire_receive(struct wire *wire, char *out, size_t size) {
    ssize_t got = wire->tls ? SSL_read(wire->tls, out, (int)size) : recv(wire->fd, out, size, 0);
    keep_to_rate(got);
    return got;
}

/* Takes 1 to `size` bytes; discards them if `out` is NULL, without TLS inside the kernel: they are never copied. */
static ssize_t wire_take(struct wire *wire, char *out, size_t size) {
    size = SMALLER(size, BUFFER_BYTES);
    if (wire->at == wire->end) {
        if (!out && !wire->tls) {
            ssize_t got = recv(wire->fd, wire->buffer, size, MSG_TRUNC);
            keep_to_rate(got);
            return got;
        }
        if (out && size == BUFFER_BYTES) return wire_receive(wire, out, size);
        ssize_t got = wire_receive(wire, wire->buffer, BUFFER_BYTES);
        if (got <= 0) return -1;
        wire->at = 0;
        wire->end = (size_t)got;
    }
    size = SMALLER(size, wire->end - wire->at);
    if (out) memcpy(out, wire->buffer + wire->at, size);
    wire->at += size;
    return (ssize_t)size;
}

static bool wire_send(struct wire *wire, const char *bytes, size_t size) {
    while (size) {
        size_t block = SMALLER(size, BUFFER_BYTES);
        ssize_t sent = wire->tls ? SSL_write(wire->tls, bytes, (int)block) : send(wire->fd, bytes, block, MSG_NOSIGNAL);
        if (sent <= 0) return false;
        bytes += sent;
        size -= (size_t)sent;
    }
    return true;
}

static bool wire_send_file(struct wire *wire, int fd, off_t offset, size_t size) {
    while (size) {
        ssize_t sent = wire->tls ? pread(fd, wire->buffer, SMALLER(size, BUFFER_BYTES), offset)
                                 : sendfile(wire->fd, fd, &offset, size);
        if (sent <= 0 || (wire->tls && !wire_send(wire, wire->buffer, (size_t)sent))) return false;
        if (wire->tls) offset += sent;
        size -= (size_t)sent;
    }
    return true;
}

/* One layer around a body. Layer 1 is HTTP's, layer 2 "aws-chunked" inside it. */
struct framing {
    bool is_chunked, has_begun, has_ended;
    long left; /* of the body, or of the chunk */
};

struct body {
    struct wire *wire;
    int depth;
    struct framing framings[2];
};

static ssize_t body_take_at(struct body *body, int depth, char *out, size_t size);

static bool body_line(struct body *body, int depth, char *line) {
    for (size_t length = 0; length < LINE_BYTES - 1; length++) {
        if (body_take_at(body, depth, line + length, 1) != 1) return false;
        if (line[length] != '\n') continue;
        line[length - (length && line[length - 1] == '\r')] = 0;
        return true;
    }
    return false;
}

static bool next_chunk(struct body *body, int depth) {
    struct framing *framing = &body->framings[depth - 1];
    char line[LINE_BYTES];
    if (framing->has_begun && !body_line(body, depth - 1, line)) return false; /* the line end after the chunk before */
    framing->has_begun = true;
    if (!body_line(body, depth - 1, line)) return false;
    framing->left = strtol(line, NULL, 16);
    framing->has_ended = framing->left == 0;
    while (framing->has_ended && *line) /* checksums of the whole body may follow */
        if (!body_line(body, depth - 1, line)) return false;
    return true;
}

/* Takes bytes of a body out of its outermost `depth` layers; 0 at its end, -1 if the connection ended before. */
static ssize_t body_take_at(struct body *body, int depth, char *out, size_t size) {
    if (depth == 0) return wire_take(body->wire, out, size);
    struct framing *framing = &body->framings[depth - 1];
    if (framing->is_chunked && !framing->left && !framing->has_ended && !next_chunk(body, depth)) return -1;
    if (framing->left == 0) return 0;
    ssize_t got = body_take_at(body, depth - 1, out, SMALLER(size, (size_t)framing->left));
    if (got <= 0) return -1;
    framing->left -= got;
    return got;
}

static ssize_t body_take(struct body *body, char *out, size_t size) { return body_take_at(body, body->depth, out, size); }

/* Reads what follows the end of the inner layer, so that the next request begins where it should. */
static bool body_finish(struct body *body) {
    ssize_t got;
    while ((got = body_take_at(body, SMALLER(body->depth, 1), NULL, BUFFER_BYTES)) > 0) continue;
    return got == 0;
}
