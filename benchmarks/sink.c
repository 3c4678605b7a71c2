/* An S3 server that costs next to nothing, so that the client is what is measured.
 *
 *     sink [-a ADDRESS] [-p PORT] [-k FOLDER] [-t CERTIFICATE KEY] [-r MBIT_PER_S] [-v]     prints the port
 *
 * Small bodies are kept in memory. Large ones are discarded, or kept in FOLDER (-k), where a download costs one sendfile.
 * Every signature and checksum is accepted. It ends with its parent. Names are expected to need no escaping in XML.
 */
#define _GNU_SOURCE
#include "sink_objects.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <signal.h>
#include <strings.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#define HEAD_BYTES (64 << 10)

struct request {
    struct wire *wire;
    char method[16];
    char name[LINE_BYTES]; /* bucket/key, or the bucket alone */
    char query[LINE_BYTES];
    char head[HEAD_BYTES]; /* one "name: value" per line */
    struct part body;
};

static bool is_verbose;

static const char *header(const struct request *request, const char *name) {
    size_t length = strlen(name);
    for (const char *line = request->head; *line; line = strchr(line, '\n') + 1)
        if (!strncasecmp(line, name, length) && line[length] == ':') return line + length + 1 + strspn(line + length + 1, " ");
    return NULL;
}

static void unescape(char *text) {
    char *out = text;
    for (; *text; text++, out++) {
        bool is_escaped = *text == '%' && isxdigit(text[1]) && isxdigit(text[2]);
        char hex[3] = {is_escaped ? text[1] : 0, is_escaped ? text[2] : 0, 0};
        *out = is_escaped ? (char)strtol(hex, NULL, 16) : *text;
        if (is_escaped) text += 2;
    }
    *out = 0;
}

/* Whether the query has `name`; its value goes to `value`, if that is not NULL. */
static bool asked(const struct request *request, const char *name, char *value) {
    size_t length = strlen(name);
    for (const char *at = request->query; *at; at += strcspn(at, "&"), at += *at == '&') {
        if (strncmp(at, name, length) || !strchr("=&", at[length])) continue;
        if (value) {
            at += length + (at[length] == '=');
            sprintf(value, "%.*s", (int)strcspn(at, "&"), at);
            unescape(value);
        }
        return true;
    }
    return false;
}

static long asked_number(const struct request *request, const char *name) {
    char value[LINE_BYTES] = "0";
    asked(request, name, value);
    return atol(value);
}

static const char *key_of(const char *name) {
    const char *slash = strchr(name, '/');
    return slash ? slash + 1 : "";
}

static bool answer(struct request *request, const char *status, const char *headers, const char *xml) {
    char *out;
    size_t size;
    FILE *stream = open_memstream(&out, &size);
    fprintf(stream, "HTTP/1.1 %s\r\nServer: sink\r\nx-amz-request-id: sink\r\n%s", status, headers);
    if (!strstr(headers, "Content-Length"))
        fprintf(stream, "Content-Type: application/xml\r\nContent-Length: %zu\r\n", strlen(xml));
    fprintf(stream, "\r\n%s", strcmp(request->method, "HEAD") ? xml : "");
    fclose(stream);
    bool is_sent = wire_send(request->wire, out, size);
    free(out);
    return is_sent;
}

static bool refuse(struct request *request, const char *status, const char *code) {
    char xml[256];
    sprintf(xml, "<?xml version=\"1.0\"?><Error><Code>%s</Code><Message>%s</Message></Error>", code, code);
    return answer(request, status, "", xml);
}

static bool answer_tag(struct request *request, long tag) {
    char headers[128];
    sprintf(headers, "ETag: \"%032lx-1\"\r\n", (unsigned long)tag);
    return answer(request, "200 OK", headers, "");
}

#include "sink_answers.h"

static bool put(struct request *request) {
    bool only_if_absent = header(request, "if-none-match"), is_part = asked(request, "uploadId", NULL), is_done;
    struct part part = request->body;
    if (!*key_of(request->name)) return answer(request, "200 OK", "", "");
    if (header(request, "x-amz-copy-source")) return refuse(request, "501 Not Implemented", "NotImplemented");
    request->body = (struct part){.fd = -1};
    pthread_mutex_lock(&tables);
    struct object *object = is_part ? upload_find(request->name, asked_number(request, "uploadId")) : object_new(request->name);
    if (object) part.number = (int)asked_number(request, "partNumber"), object_add(object, part);
    is_done = is_part ? object != NULL : object_publish(object, only_if_absent);
    if (!is_done) object ? object_release(object) : part_free(&part);
    pthread_mutex_unlock(&tables);
    if (is_done) return answer_tag(request, part.tag);
    if (is_part) return refuse(request, "404 Not Found", "NoSuchUpload");
    return refuse(request, "412 Precondition Failed", "PreconditionFailed");
}

static bool post(struct request *request) {
    if (asked(request, "uploads", NULL)) return create_upload(request);
    if (asked(request, "uploadId", NULL)) return complete_upload(request);
    if (asked(request, "delete", NULL)) return delete_objects(request);
    return refuse(request, "501 Not Implemented", "NotImplemented");
}

static bool delete(struct request *request) {
    pthread_mutex_lock(&tables);
    if (asked(request, "uploadId", NULL)) {
        struct object *upload = upload_find(request->name, asked_number(request, "uploadId"));
        if (upload) table_remove(&uploads, upload), object_release(upload);
    } else {
        object_delete(table_find(&objects, request->name));
    }
    pthread_mutex_unlock(&tables);
    return answer(request, "204 No Content", "", "");
}

static bool get(struct request *request) {
    if (asked(request, "location", NULL)) return answer(request, "200 OK", "", "<?xml version=\"1.0\"?><LocationConstraint/>");
    if (asked(request, "uploads", NULL)) return list_uploads(request);
    if (asked(request, "uploadId", NULL)) return list_parts(request);
    if (*key_of(request->name)) return get_object(request);
    if (strcmp(request->method, "HEAD")) return list_objects(request);
    return answer(request, "200 OK", "x-amz-bucket-region: us-east-1\r\n", "");
}

static bool respond(struct request *request) {
    static const struct { const char *method; bool (*does)(struct request *); } methods[] = {
        {"PUT", put}, {"POST", post}, {"DELETE", delete}, {"GET", get}, {"HEAD", get}};
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        if (!strcmp(request->method, methods[i].method)) return methods[i].does(request);
    return refuse(request, "501 Not Implemented", "NotImplemented");
}

static bool read_head(struct request *request) {
    struct body raw = {.wire = request->wire};
    char line[LINE_BYTES], target[LINE_BYTES];
    size_t size = 0;
    if (!body_line(&raw, 0, line) || sscanf(line, "%15s %16000s", request->method, target) != 2) return false;
    if (is_verbose) fprintf(stderr, "%s\n", line);
    char *query = strchr(target, '?');
    strcpy(request->query, query ? query + 1 : "");
    target[strcspn(target, "?")] = 0;
    unescape(target);
    strcpy(request->name, target + (*target == '/'));
    while (body_line(&raw, 0, line) && *line && size + strlen(line) + 2 < HEAD_BYTES)
        size += (size_t)sprintf(request->head + size, "%s\n", line);
    request->head[size] = 0;
    return !*line;
}

static bool read_body(struct request *request) {
    const char *length = header(request, "content-length"), *decoded = header(request, "x-amz-decoded-content-length");
    const char *transfer = header(request, "transfer-encoding"), *expect = header(request, "expect");
    bool is_chunked = transfer && !strncasecmp(transfer, "chunked", 7);
    struct body body = {.wire = request->wire, .depth = decoded ? 2 : 1};
    body.framings[0] = (struct framing){.is_chunked = is_chunked, .left = !is_chunked && length ? atol(length) : 0};
    body.framings[1] = (struct framing){.is_chunked = true};
    bool is_asking = expect && !strncasecmp(expect, "100", 3);
    if (is_asking && !wire_send(request->wire, "HTTP/1.1 100 Continue\r\n\r\n", 25)) return false;
    return part_receive(&request->body, &body, decoded ? atol(decoded) : is_chunked ? -1 : length ? atol(length) : 0);
}

static void *serve(void *given) {
    struct wire *wire = given;
    struct request *request = calloc(1, sizeof *request);
    request->wire = wire;
    request->body.fd = -1;
    bool is_open = !wire->tls || SSL_accept(wire->tls) > 0;
    while (is_open && read_head(request)) {
        is_open = read_body(request) && respond(request);
        part_free(&request->body);
        request->body = (struct part){.fd = -1};
        const char *connection = header(request, "connection");
        if (connection && !strncasecmp(connection, "close", 5)) break;
    }
    if (wire->tls) SSL_shutdown(wire->tls), SSL_free(wire->tls);
    close(wire->fd);
    free(wire->buffer);
    free(wire);
    free(request);
    return NULL;
}

static SSL_CTX *tls_context(const char *certificate, const char *key) {
    SSL_CTX *context = SSL_CTX_new(TLS_server_method());
    if (SSL_CTX_use_certificate_chain_file(context, certificate) > 0 &&
        SSL_CTX_use_PrivateKey_file(context, key, SSL_FILETYPE_PEM) > 0)
        return context;
    ERR_print_errors_fp(stderr);
    exit(1);
}

static int listen_at(const char *address, int port) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    socklen_t length = sizeof at;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    inet_aton(address, &at.sin_addr);
    if (bind(fd, (void *)&at, sizeof at) || listen(fd, 512)) perror(address), exit(1);
    getsockname(fd, (void *)&at, &length);
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    return fd;
}

int main(int count, char **given) {
    const char *address = "127.0.0.1";
    SSL_CTX *context = NULL;
    struct rlimit files;
    int port = 0, option;
    while ((option = getopt(count, given, "a:p:k:t:r:v")) != -1) {
        if (option == 'a') address = optarg;
        else if (option == 'p') port = atoi(optarg);
        else if (option == 'k') kept_in = optarg;
        else if (option == 't') context = tls_context(optarg, given[optind++]);
        else if (option == 'r') bytes_per_s = atof(optarg) * 1e6 / 8;
        else if (option == 'v') is_verbose = true;
        else return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    signal(SIGPIPE, SIG_IGN);
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    for (int listening = listen_at(address, port);;) {
        struct wire *wire = calloc(1, sizeof *wire);
        int one = 1;
        pthread_t thread;
        while ((wire->fd = accept(listening, NULL, NULL)) < 0) continue;
        setsockopt(wire->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        wire->buffer = malloc(BUFFER_BYTES);
        if (context) wire->tls = SSL_new(context), SSL_set_fd(wire->tls, wire->fd);
        if (!pthread_create(&thread, NULL, serve, wire)) pthread_detach(thread);
    }
}
