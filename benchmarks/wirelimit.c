/* The physical limit: the same bytes over plain sockets, without signatures, checksums, retries or a library.
 *
 *     wirelimit up|down ADDRESS PORT CONNECTIONS [CERTIFICATES]     reads "TARGET OFFSET SIZE FILE" lines, prints what it cost
 *
 * Each line is one request on a kept-alive connection: a PUT of a range of FILE with sendfile, or a GET of a range into it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define BLOCK_BYTES (256 << 10)
#define MAX_CONNECTIONS 64
#define SMALLER(a, b) ((a) < (b) ? (a) : (b))

static bool is_upload;
static struct sockaddr_in server;
static SSL_CTX *context;

struct connection {
    int fd;
    SSL *tls;
    char *block;
};

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static struct connection dial(void) {
    struct connection to = {.fd = socket(AF_INET, SOCK_STREAM, 0), .block = malloc(BLOCK_BYTES)};
    int one = 1;
    if (connect(to.fd, (void *)&server, sizeof server)) fail("connect");
    setsockopt(to.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (!context) return to;
    to.tls = SSL_new(context);
    SSL_set_fd(to.tls, to.fd);
    if (SSL_connect(to.tls) <= 0) fail("TLS");
    return to;
}

static void send_all(struct connection *to, const char *bytes, long size) {
    while (size) {
        ssize_t sent = to->tls ? SSL_write(to->tls, bytes, (int)size)
                               : send(to->fd, bytes, (size_t)size, is_upload ? MSG_MORE : 0);
        if (sent <= 0) fail("send");
        bytes += sent, size -= sent;
    }
}

static ssize_t receive(struct connection *from, long size) {
    size = SMALLER(size, BLOCK_BYTES);
    ssize_t got = from->tls ? SSL_read(from->tls, from->block, (int)size) : recv(from->fd, from->block, (size_t)size, 0);
    if (got <= 0) fail("receive");
    return got;
}

static void send_range(struct connection *to, int fd, off_t offset, long size) {
    while (size) {
        ssize_t sent = to->tls ? pread(fd, to->block, (size_t)SMALLER(size, BLOCK_BYTES), offset)
                               : sendfile(to->fd, fd, &offset, (size_t)size);
        if (sent <= 0) fail("sendfile");
        if (to->tls) send_all(to, to->block, sent), offset += sent;
        size -= sent;
    }
}

/* Reads an answer's head byte by byte, so that nothing of the body is taken with it. */
static long read_head(struct connection *from) {
    char head[8192];
    size_t length = 0;
    do {
        if (length + 1 == sizeof head) exit(1);
        if ((from->tls ? SSL_read(from->tls, head + length, 1) : recv(from->fd, head + length, 1, 0)) != 1) fail("answer");
        head[++length] = 0;
    } while (length < 4 || strcmp(head + length - 4, "\r\n\r\n"));
    const char *size = strcasestr(head, "content-length:");
    if (strncmp(head, "HTTP/1.1 2", 10)) fprintf(stderr, "%s", head), exit(1);
    return size ? atol(size + 15) : 0;
}

static void receive_range(struct connection *from, int fd, off_t offset, long size) {
    while (size) {
        ssize_t got = receive(from, size);
        if (fd >= 0 && pwrite(fd, from->block, (size_t)got, offset) != got) fail("write");
        offset += got, size -= got;
    }
}

static void perform(struct connection *with, const char *target, long offset, long size, const char *path) {
    char head[8192];
    const char *format = is_upload ? "PUT %s HTTP/1.1\r\nHost: %s:%d\r\nContent-Length: %ld\r\n\r\n"
                                   : "GET %s HTTP/1.1\r\nHost: %s:%d\r\nRange: bytes=%ld-%ld\r\n\r\n";
    int fd = open(path, is_upload ? O_RDONLY : O_WRONLY | O_CREAT, 0600);
    if (fd < 0) fail(path);
    int length = snprintf(head, sizeof head, format, target, inet_ntoa(server.sin_addr), ntohs(server.sin_port),
                          is_upload ? size : offset, offset + size - 1);
    send_all(with, head, length);
    if (is_upload) send_range(with, fd, offset, size);
    if (is_upload && !with->tls) setsockopt(with->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int)); /* flushes MSG_MORE */
    long answered = read_head(with);
    receive_range(with, is_upload ? -1 : fd, offset, answered);
    close(fd);
}

static void *work(void *unused) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    struct connection with = dial();
    char target[8000], path[4096];
    long offset, size;
    for (;;) {
        pthread_mutex_lock(&lock);
        bool is_over = scanf("%7999s %ld %ld %4095[^\n]", target, &offset, &size, path) != 4;
        pthread_mutex_unlock(&lock);
        if (is_over) return unused;
        perform(&with, target, offset, size, path);
    }
}

static double seconds(struct timeval time) { return (double)time.tv_sec + (double)time.tv_usec / 1e6; }

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static long peak_rss_kib(void) {
    char line[256];
    long kib = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status)) sscanf(line, "VmHWM: %ld", &kib);
    return kib;
}

int main(int count, char **given) {
    if (count < 5) return 2;
    struct rusage used;
    pthread_t threads[MAX_CONNECTIONS];
    int connections = SMALLER(atoi(given[4]), MAX_CONNECTIONS);
    is_upload = !strcmp(given[1], "up");
    server = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(given[3]))};
    inet_aton(given[2], &server.sin_addr);
    if (count > 5) {
        context = SSL_CTX_new(TLS_client_method());
        SSL_CTX_load_verify_locations(context, given[5], NULL);
        SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL);
    }
    double began_s = now_s();
    for (int i = 0; i < connections; i++) pthread_create(&threads[i], NULL, work, NULL);
    for (int i = 0; i < connections; i++) pthread_join(threads[i], NULL);
    double wall_s = now_s() - began_s;
    getrusage(RUSAGE_SELF, &used);
    printf("{\"cpu_s\": %.4f, \"peak_rss_mib\": %.1f, \"wall_s\": %.4f}\n", seconds(used.ru_utime) + seconds(used.ru_stime),
           (double)peak_rss_kib() / 1024, wall_s);
}
