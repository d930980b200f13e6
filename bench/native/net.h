/* What the fake engine and the load client share. Linux only; one thread, one epoll. */
#ifndef BENCH_NET_H
#define BENCH_NET_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define STREAMS_MAX 65536
/* A control datagram is a list of stream numbers: the reader has one more token of each. With this bit the engine
 * shall end the stream now and say how many tokens it sent. */
#define CONTROL_FINISH 0x80000000u
#define CONTROL_ITEMS_MAX 1024

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline _Noreturn void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(1);
}

typedef struct {
    char *at;
    size_t used, room;
} Buffer;

static inline void buffer_reserve(Buffer *b, size_t more) {
    if (b->used + more <= b->room) return;
    size_t room = b->room ? b->room : 1024;
    while (room < b->used + more) room *= 2;
    b->at = realloc(b->at, room);
    if (!b->at) die("out of memory");
    b->room = room;
}

static inline void buffer_put(Buffer *b, const void *data, size_t size) {
    buffer_reserve(b, size);
    memcpy(b->at + b->used, data, size);
    b->used += size;
}

static inline void buffer_drop(Buffer *b, size_t size) {
    if (!size) return;
    b->used -= size;
    memmove(b->at, b->at + size, b->used);
}

static inline void buffer_free(Buffer *b) {
    free(b->at);
    *b = (Buffer){0};
}

static inline void raise_file_limit(void) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static inline struct sockaddr_in loopback(const char *host, int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) die("not an IPv4 address: %s", host);
    return address;
}

static inline struct sockaddr_un control_address(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) die("the control path is too long: %s", path);
    strcpy(address.sun_path, path);
    return address;
}

#endif
