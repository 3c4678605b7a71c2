/* A long-distance link between two network namespaces, for kernels without netem.
 *
 *     wanlink NAMESPACE_A ADDRESS_A NAMESPACE_B ADDRESS_B DELAY_MS MBIT_PER_S [QUEUE_KIB]     prints "ready"
 *
 * Makes a TUN device in each namespace, which must exist, and relays packets between them: each waits its turn at the given
 * rate, then the one-way delay; what does not fit into the queue is dropped. So real TCP, with its windows and its congestion
 * control, runs over it. Segments that the kernel left joined (GSO) pass whole. It ends with its parent.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define PACKETS 65536
#define SEGMENT_BYTES 1448
#define SEGMENT_HEADER_BYTES 40 /* of every segment that a joined packet stands for */

struct packet {
    double due_s;
    ssize_t size;
    char *bytes;
};

struct direction {
    int in, out;
    double delay_s, bytes_per_s, free_at_s; /* free_at_s: when the wire has sent what it took so far */
    long limit_bytes, held_bytes;           /* in the queue and on the way */
    struct packet *ring;
    unsigned head, tail;
    pthread_mutex_t lock;
    pthread_cond_t arrived;
};

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void *take(void *given) {
    struct direction *way = given;
    static __thread char bytes[70000];
    for (;;) {
        ssize_t size = read(way->in, bytes, sizeof bytes);
        if (size <= 0) continue;
        double arrived_s = now_s();
        pthread_mutex_lock(&way->lock);
        if (way->held_bytes + size <= way->limit_bytes && way->tail - way->head < PACKETS) {
            if (way->free_at_s < arrived_s) way->free_at_s = arrived_s;
            way->free_at_s += (size + (double)SEGMENT_HEADER_BYTES * (size / SEGMENT_BYTES)) / way->bytes_per_s;
            struct packet *packet = &way->ring[way->tail++ % PACKETS];
            *packet = (struct packet){way->free_at_s + way->delay_s, size, malloc((size_t)size)};
            memcpy(packet->bytes, bytes, (size_t)size);
            way->held_bytes += size;
            pthread_cond_signal(&way->arrived);
        }
        pthread_mutex_unlock(&way->lock);
    }
    return NULL;
}

static void *deliver(void *given) {
    struct direction *way = given;
    for (;;) {
        pthread_mutex_lock(&way->lock);
        while (way->head == way->tail) pthread_cond_wait(&way->arrived, &way->lock);
        struct packet packet = way->ring[way->head % PACKETS];
        pthread_mutex_unlock(&way->lock);
        double wait_s = packet.due_s - now_s();
        struct timespec wait = {(time_t)wait_s, (long)((wait_s - (time_t)wait_s) * 1e9)};
        if (wait_s > 0) nanosleep(&wait, NULL);
        if (write(way->out, packet.bytes, (size_t)packet.size) < 0) perror("a packet was lost");
        free(packet.bytes);
        pthread_mutex_lock(&way->lock);
        way->head++;
        way->held_bytes -= packet.size;
        pthread_mutex_unlock(&way->lock);
    }
    return NULL;
}

static int open_tun(const char *namespace, const char *address, const char *peer) {
    char text[256];
    struct ifreq device = {.ifr_name = "wan0", .ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    snprintf(text, sizeof text, "/var/run/netns/%s", namespace);
    int inside = open(text, O_RDONLY), before = open("/proc/self/ns/net", O_RDONLY);
    if (inside < 0 || setns(inside, CLONE_NEWNET)) fail(text);
    int fd = open("/dev/net/tun", O_RDWR);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &device)) fail("/dev/net/tun");
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) fail("TUNSETOFFLOAD");
    const char *up = "ip link set lo up && ip addr add %s peer %s dev wan0 && ip link set wan0 mtu 1500 up";
    snprintf(text, sizeof text, up, address, peer);
    if (system(text)) exit(1);
    setns(before, CLONE_NEWNET);
    close(inside);
    close(before);
    return fd;
}

static void start(struct direction *way) {
    pthread_t thread;
    way->ring = calloc(PACKETS, sizeof *way->ring);
    pthread_mutex_init(&way->lock, NULL);
    pthread_cond_init(&way->arrived, NULL);
    pthread_create(&thread, NULL, take, way);
    pthread_create(&thread, NULL, deliver, way);
}

int main(int count, char **given) {
    if (count < 7) return 2;
    double delay_s = atof(given[5]) / 1e3, bytes_per_s = atof(given[6]) * 1e6 / 8;
    long queue_bytes = (count > 7 ? atol(given[7]) : 4096) << 10;
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    int a = open_tun(given[1], given[2], given[4]), b = open_tun(given[3], given[4], given[2]);
    struct direction there = {.in = a, .out = b, .delay_s = delay_s, .bytes_per_s = bytes_per_s};
    there.limit_bytes = queue_bytes + (long)(bytes_per_s * delay_s); /* what is on the way takes no room in the queue */
    struct direction back = there;
    back.in = b, back.out = a;
    start(&there);
    start(&back);
    puts("ready");
    fflush(stdout);
    for (;;) pause();
}
