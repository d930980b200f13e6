/* The reader of many token streams: opens them, checks every one, counts, and prints one line of JSON.
 *
 *   load --target 127.0.0.1:8080 --kind sse|ws --streams 100 [--key K] [--model M] [--control PATH]
 *        [--mode step|phase|closed|backlog|idle] [--rate R] [--window W] [--open-every-us U]
 *        [--per-socket K] [--watch name=pid,name=pid]
 *     and one of
 *        --seconds S [--settle S]                  measure S seconds of steady streams, then end them
 *        --total M --tokens T [--per-connection K]  M short streams, --streams of them at a time
 *        --hold                                    open them, say so, keep them until a line comes on stdin
 *
 * A stream is right when its tokens came once each, in order, with a finish reason and its protocol's end, and as
 * many as the engine says it sent. Anything else ends the run with exit code 1 and the reason on stderr.
 *
 * It reads the CPU clocks of the processes under test itself: clock and token counts then belong to one instant.
 */
#include "net.h"

typedef struct {
    uint32_t number, tokens; /* tokens: also the index of the next one */
    uint64_t asked_ns, seq, last_us; /* last_us: when its last token was read */
    uint32_t told; /* how many the engine says it sent */
    bool open, finished, done, knows_total;
} Stream;

enum state { CONNECTING, HEADERS, BODY };
enum chunk { SIZE, DATA, DATA_END, TRAILER };

typedef struct {
    int fd;
    enum state state;
    enum chunk chunk;
    size_t left;
    Buffer in, text;
    Stream *streams;
    uint32_t open, served, times; /* times: it was connected */
} Conn;

typedef struct {
    char name[32];
    int pid;
    clockid_t clock;
    uint64_t cpu_ns[2], user[2], kernel[2];
} Watched;

static struct {
    const char *host, *key, *model, *mode, *control;
    int port;
    bool ws, hold;
    uint32_t streams, per_socket, window, tokens, total, per_connection, open_every_us;
    double rate, seconds, settle;
} o = {.host = "127.0.0.1", .key = "", .model = "bench", .mode = "phase", .streams = 1, .per_socket = 1, .window = 1,
       .rate = 50, .settle = 0.5, .per_connection = 1, .open_every_us = 2000};

enum { DELAY_US_MAX = 1 << 21 };
static uint32_t delays[DELAY_US_MAX], gaps[DELAY_US_MAX];
static uint32_t *ttfts;
static size_t ttft_count, ttft_room;
static int epoll_fd, control_fd = -1;
static Conn *conns;
static uint32_t conn_count, started, first_seen, completed, greeted;
static uint64_t tokens_all, token_reads, read_ns, progress_ns, window_tokens[2], window_reads[2], window_ns[2];
static bool measuring;
static uint32_t acks[CONTROL_ITEMS_MAX];
static size_t ack_count;
static Watched watched[16];
static int watched_count;

/* --- control and clocks ---------------------------------------------------------------------------------- */

static void acks_flush(void) {
    if (!ack_count) return;
    if (send(control_fd, acks, ack_count * sizeof *acks, 0) < 0) die("load: the engine's control socket: %s", strerror(errno));
    ack_count = 0;
}

static void ack(uint32_t item) {
    acks[ack_count++] = item;
    if (ack_count == CONTROL_ITEMS_MAX) acks_flush();
}

static void snapshot(int side) {
    window_ns[side] = now_ns();
    window_tokens[side] = tokens_all;
    window_reads[side] = token_reads;
    for (int i = 0; i < watched_count; i++) {
        Watched *w = &watched[i];
        struct timespec t;
        if (clock_gettime(w->clock, &t)) die("load: process %d (%s) is gone", w->pid, w->name);
        w->cpu_ns[side] = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
        char path[64], line[1024];
        snprintf(path, sizeof path, "/proc/%d/stat", w->pid);
        FILE *file = fopen(path, "r");
        if (!file || !fgets(line, sizeof line, file)) die("load: cannot read %s", path);
        fclose(file);
        char *after_name = strrchr(line, ')');
        unsigned long long user = 0, kernel = 0;
        if (after_name) sscanf(after_name + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &user, &kernel);
        w->user[side] = user;
        w->kernel[side] = kernel;
    }
}

/* --- what a stream must hold ------------------------------------------------------------------------------ */

static void first_token(Stream *s) {
    if (ttft_count == ttft_room) {
        ttft_room = ttft_room ? ttft_room * 2 : 1024;
        ttfts = realloc(ttfts, ttft_room * sizeof *ttfts);
    }
    ttfts[ttft_count++] = (uint32_t)((read_ns - s->asked_ns) / 1000);
    first_seen++;
}

static void count(uint32_t *histogram, uint64_t us) { histogram[us < DELAY_US_MAX ? us : DELAY_US_MAX - 1]++; }

/* The text of one delta: any number of whole tokens. */
static void take_text(Stream *s, const char *p, const char *end) {
    while (p < end) {
        char *after;
        if (end - p < 3 || p[0] != ' ' || (p[1] != 't' && p[1] != 'z'))
            die("load: stream %u: strange text after %u tokens: %.*s", s->number, s->tokens, (int)(end - p), p);
        uint32_t value = (uint32_t)strtoul(p + 2, &after, 10);
        if (p[1] == 'z') {
            s->told = value;
            s->knows_total = true;
            p = after;
            continue;
        }
        if (value != s->tokens) die("load: stream %u: token %u came where %u was due", s->number, value, s->tokens);
        if (s->knows_total || s->finished) die("load: stream %u: a token after the last", s->number);
        uint64_t sent_us = *after == '@' ? strtoull(after + 1, &after, 16) : 0;
        if (!s->tokens++) first_token(s);
        tokens_all++;
        uint64_t now_us = read_ns / 1000;
        if (measuring && sent_us) count(delays, now_us > sent_us ? now_us - sent_us : 0);
        if (measuring && s->last_us) count(gaps, now_us - s->last_us);
        s->last_us = now_us;
        if (!strcmp(o.mode, "closed")) ack(s->number);
        p = after;
    }
}

/* JSON of one or several chunks. Only these two members matter, and a text never holds a quote. */
static void take_chunks(Stream *s, const char *p, size_t size) {
    static const char CONTENT[] = "\"content\":\"", FINISH[] = "\"finish_reason\":\"";
    const char *end = p + size, *at = p;
    while ((at = memmem(at, (size_t)(end - at), CONTENT, sizeof CONTENT - 1))) {
        at += sizeof CONTENT - 1;
        const char *quote = memchr(at, '"', (size_t)(end - at));
        if (!quote) die("load: stream %u: half a chunk: %.*s", s->number, (int)size, p);
        take_text(s, at, quote);
        at = quote;
    }
    if (memmem(p, size, FINISH, sizeof FINISH - 1)) s->finished = true;
}

static void check_end(Stream *s) {
    uint32_t due = s->knows_total ? s->told : o.tokens;
    if (!s->finished) die("load: stream %u ended after %u tokens without a finish reason", s->number, s->tokens);
    if (!due || s->tokens != due) die("load: stream %u: %u tokens of %u", s->number, s->tokens, due);
    s->open = false;
    completed++;
}

/* --- requests --------------------------------------------------------------------------------------------- */

static void send_all(Conn *c, const void *data, size_t size) {
    if (send(c->fd, data, size, MSG_NOSIGNAL) != (ssize_t)size) die("load: a request could not be written: %s", strerror(errno));
}

static void ws_send(Conn *c, int opcode, const char *text, size_t size) {
    static const unsigned char MASK[4] = {0x37, 0xfa, 0x21, 0x3d};
    unsigned char frame[2048];
    size_t head = 2;
    if (size + 8 > sizeof frame) die("load: a message too large");
    frame[0] = (unsigned char)(0x80 | opcode);
    if (size < 126) {
        frame[1] = (unsigned char)(0x80 | size);
    } else {
        frame[1] = 0x80 | 126;
        frame[2] = (unsigned char)(size >> 8);
        frame[3] = (unsigned char)size;
        head = 4;
    }
    memcpy(frame + head, MASK, 4);
    head += 4;
    for (size_t i = 0; i < size; i++) frame[head + i] = (unsigned char)text[i] ^ MASK[i % 4];
    send_all(c, frame, head + size);
}

static void ask(Conn *c, Stream *s) {
    char body[512], request[1536];
    *s = (Stream){.number = started++ % STREAMS_MAX, .open = true, .asked_ns = now_ns()};
    c->open++;
    c->served++;
    int n = snprintf(body, sizeof body,
                     "{\"model\":\"%s\",\"stream\":true,\"max_tokens\":%u,\"messages\":[{\"role\":\"user\",\"content\":"
                     "\"bench mode=%s rate=%g window=%u stream=%u;\"}]}",
                     o.model, o.tokens ? o.tokens : 100000, o.mode, o.rate, o.window, s->number);
    if (o.ws) {
        n = snprintf(request, sizeof request, "{\"t\":\"create\",\"ch\":%d,\"dialect\":\"openai.chat\",\"body\":%s}",
                     (int)(s - c->streams) + 1, body);
        ws_send(c, 1, request, (size_t)n);
        return;
    }
    c->state = HEADERS;
    n = snprintf(request, sizeof request,
                 "POST /v1/chat/completions HTTP/1.1\r\nHost: %s:%d\r\nAuthorization: Bearer %s\r\n"
                 "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
                 o.host, o.port, o.key, n, body);
    send_all(c, request, (size_t)n);
}

static void upgrade(Conn *c) {
    char request[1024];
    c->state = HEADERS;
    int n = snprintf(request, sizeof request,
                     "GET /v1/stream HTTP/1.1\r\nHost: %s:%d\r\nAuthorization: Bearer %s\r\nUpgrade: websocket\r\n"
                     "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
                     "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: tokenstream.v1\r\n\r\n",
                     o.host, o.port, o.key);
    send_all(c, request, (size_t)n);
}

static void connect_one(Conn *c) {
    int on = 1;
    Stream *streams = c->streams;
    uint32_t times = c->times + 1;
    if (c->fd > 0) close(c->fd);
    buffer_free(&c->in);
    buffer_free(&c->text);
    *c = (Conn){.fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), .streams = streams, .times = times};
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct sockaddr_in address = loopback(o.host, o.port);
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS)
        die("load: cannot connect to %s:%d: %s", o.host, o.port, strerror(errno));
    struct epoll_event event = {.events = EPOLLOUT, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event);
}

static void stream_over(Conn *c, Stream *s) {
    check_end(s);
    c->open--;
    if (!o.total || started >= o.total) return;
    if (c->served < o.per_connection) ask(c, s);
    else if (!c->open) connect_one(c);
}

/* --- SSE -------------------------------------------------------------------------------------------------- */

static void sse_line(Conn *c, const char *line, size_t size) {
    Stream *s = c->streams;
    if (!size || line[0] == ':' || size < 6) return;
    if (!memcmp(line, "id: ", 4)) {
        const char *dash = memchr(line, '-', size);
        uint64_t seq = dash ? strtoull(dash + 1, NULL, 10) : 0;
        if (seq < s->seq) die("load: stream %u: the cursor went back to %.*s", s->number, (int)size, line);
        s->seq = seq;
    } else if (!memcmp(line, "data: ", 6)) {
        if (s->done) die("load: stream %u: data after [DONE]", s->number);
        if (size == 12 && !memcmp(line + 6, "[DONE]", 6)) s->done = true;
        else if (size > 14 && !memcmp(line + 6, "{\"error\"", 8)) die("load: stream %u: %.*s", s->number, (int)size, line);
        else take_chunks(s, line + 6, size - 6);
    } else {
        die("load: stream %u: a strange line: %.*s", s->number, (int)size, line);
    }
}

static void sse_text(Conn *c) {
    char *at = c->text.at, *end = at + c->text.used, *newline;
    while (at < end && (newline = memchr(at, '\n', (size_t)(end - at)))) {
        *newline = 0; /* ends the number parsing */
        sse_line(c, at, (size_t)(newline - at));
        at = newline + 1;
    }
    buffer_drop(&c->text, (size_t)(at - c->text.at));
}

static void sse_body(Conn *c) {
    char *at = c->in.at, *end = at + c->in.used;
    bool over = false;
    while (at < end && !over) {
        if (c->chunk == DATA) {
            size_t take = (size_t)(end - at) < c->left ? (size_t)(end - at) : c->left;
            buffer_put(&c->text, at, take);
            at += take;
            c->left -= take;
            if (!c->left) c->chunk = DATA_END;
            continue;
        }
        char *newline = memchr(at, '\n', (size_t)(end - at));
        if (!newline) break;
        if (c->chunk == SIZE) {
            c->left = strtoul(at, NULL, 16);
            c->chunk = c->left ? DATA : TRAILER;
        } else if (c->chunk == DATA_END) {
            if (newline - at != 1) die("load: a chunk without its end");
            c->chunk = SIZE;
        } else if (newline - at == 1) {
            over = true;
        }
        at = newline + 1;
    }
    buffer_drop(&c->in, (size_t)(at - c->in.at));
    sse_text(c);
    if (!over) return;
    if (!c->streams->done || c->text.used) die("load: stream %u: the body ended without [DONE]", c->streams->number);
    stream_over(c, c->streams);
}

/* --- WebSocket -------------------------------------------------------------------------------------------- */

static uint64_t member(const char *text, size_t size, const char *key, uint64_t otherwise) {
    const char *at = memmem(text, size, key, strlen(key));
    return at ? strtoull(at + strlen(key), NULL, 10) : otherwise;
}

static void ws_text(Conn *c, const char *text, size_t size) {
    size_t head = size < 96 ? size : 96;
    const char *type = memmem(text, head, "\"t\":\"", 5);
    if (!type) die("load: a message without t: %.*s", (int)size, text);
    type += 5;
    if (!strncmp(type, "hi\"", 3)) {
        greeted++;
        for (uint32_t i = 0; i < o.per_socket && (!o.total || started < o.total); i++) ask(c, &c->streams[i]);
        return;
    }
    if (!strncmp(type, "ping\"", 5)) {
        ws_send(c, 1, "{\"t\":\"pong\"}", 12);
        return;
    }
    uint64_t channel = member(text, head, "\"ch\":", 0);
    if (!channel || channel > o.per_socket) die("load: no such channel: %.*s", (int)size, text);
    Stream *s = &c->streams[channel - 1];
    if (!s->open) die("load: a message of a closed channel: %.*s", (int)size, text);
    if (!strncmp(type, "ok\"", 3)) return;
    if (!strncmp(type, "d\"", 2)) {
        const char *list = memmem(text, head, "\"f\":", 4);
        if (!list) die("load: a d without f: %.*s", (int)size, text);
        uint64_t seq = member(text, (size_t)(list - text), "\"s\":", 0), after = member(text, (size_t)(list - text), "\"a\":", seq - 1);
        if (after != s->seq) die("load: stream %u: frames after %llu where %llu was due", s->number, (unsigned long long)after, (unsigned long long)s->seq);
        s->seq = seq;
        take_chunks(s, list, size - (size_t)(list - text));
    } else if (!strncmp(type, "end\"", 4)) {
        if (!memmem(text, size, "\"status\":\"completed\"", 20)) die("load: stream %u: %.*s", s->number, (int)size, text);
        stream_over(c, s);
    } else {
        die("load: stream %u: %.*s", s->number, (int)size, text);
    }
}

static void ws_frames(Conn *c) {
    size_t at = 0;
    uint32_t times = c->times;
    while (c->in.used - at >= 2) {
        unsigned char *frame = (unsigned char *)c->in.at + at;
        size_t head = 2, size = frame[1] & 0x7f;
        if (frame[1] & 0x80) die("load: the server masks its frames");
        if (!(frame[0] & 0x80) || frame[0] & 0x70) die("load: a fragmented or compressed message");
        if (size == 126) head = 4;
        if (size == 127) head = 10;
        if (c->in.used - at < head) break;
        if (head > 2) {
            size = 0;
            for (size_t i = 2; i < head; i++) size = size << 8 | frame[i];
        }
        if (c->in.used - at < head + size) break;
        char *text = (char *)frame + head;
        switch (frame[0] & 0x0f) {
        case 1: ws_text(c, text, size); break;
        case 8: die("load: closed by the server: %d %.*s", size > 1 ? (unsigned char)text[0] << 8 | (unsigned char)text[1] : 0, size > 2 ? (int)size - 2 : 0, text + 2);
        case 9: ws_send(c, 10, text, size); break;
        default: break;
        }
        if (c->times != times) return; /* the last stream of the connection ended and it was opened anew */
        at += head + size;
    }
    buffer_drop(&c->in, at);
}

/* --- connections ------------------------------------------------------------------------------------------ */

static void headers(Conn *c) {
    char *end = memmem(c->in.at, c->in.used, "\r\n\r\n", 4);
    if (!end) return;
    size_t size = (size_t)(end - c->in.at) + 4;
    char *status = o.ws ? "HTTP/1.1 101" : "HTTP/1.1 200";
    if (strncmp(c->in.at, status, 12)) die("load: answered %.*s", (int)c->in.used, c->in.at);
    *end = 0;
    if (!o.ws && !strcasestr(c->in.at, "transfer-encoding: chunked")) die("load: not chunked: %s", c->in.at);
    if (o.ws && (!strstr(c->in.at, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=") || !strcasestr(c->in.at, "sec-websocket-protocol: tokenstream.v1")))
        die("load: a strange upgrade: %s", c->in.at);
    buffer_drop(&c->in, size);
    c->state = BODY;
    c->chunk = SIZE;
}

static void conn_event(Conn *c, uint32_t events) {
    if (c->state == CONNECTING) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error) die("load: cannot connect to %s:%d: %s", o.host, o.port, strerror(error));
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
        if (o.ws) upgrade(c);
        else if (o.total && started >= o.total) return;
        else ask(c, c->streams);
        return;
    }
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    /* 64 KiB at once and no second recv to see EAGAIN: epoll is level-triggered and says so again */
    buffer_reserve(&c->in, 65536);
    ssize_t n = recv(c->fd, c->in.at + c->in.used, c->in.room - c->in.used - 1, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
        if (!c->open) {
            epoll_ctl(epoll_fd, EPOLL_CTL_DEL, c->fd, NULL);
            return;
        }
        die("load: stream %u: the connection was lost after %u tokens", c->streams->number, c->streams->tokens);
    }
    read_ns = now_ns();
    progress_ns = read_ns;
    c->in.used += (size_t)n;
    c->in.at[c->in.used] = 0;
    uint64_t tokens_before = tokens_all;
    if (c->state == HEADERS) headers(c);
    if (c->state == BODY && c->in.used) {
        if (o.ws) ws_frames(c);
        else sse_body(c);
    }
    token_reads += tokens_all != tokens_before;
    if (!c->in.used) buffer_free(&c->in); /* thousands of idle connections hold no buffers */
    if (!c->text.used) buffer_free(&c->text);
}

/* --- results ---------------------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static uint32_t value_at(const uint32_t *histogram, double share) {
    uint64_t all = 0, seen = 0;
    for (int i = 0; i < DELAY_US_MAX; i++) all += histogram[i];
    for (uint32_t i = 0; i < DELAY_US_MAX; i++)
        if ((seen += histogram[i]) > (uint64_t)((double)all * share)) return i;
    return 0;
}

static void print_result(void) {
    double seconds = (double)(window_ns[1] - window_ns[0]) / 1e9;
    struct timespec self;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &self);
    qsort(ttfts, ttft_count, sizeof *ttfts, by_value);
    printf("{\"completed\":%u,\"tokens_all\":%llu,\"seconds\":%.4f,\"tokens\":%llu,\"load_cpu_s\":%.3f,", completed,
           (unsigned long long)tokens_all, seconds, (unsigned long long)(window_tokens[1] - window_tokens[0]),
           (double)self.tv_sec + (double)self.tv_nsec / 1e9);
    printf("\"reads\":%llu,", (unsigned long long)(window_reads[1] - window_reads[0]));
    printf("\"delay_us\":[%u,%u],", value_at(delays, 0.5), value_at(delays, 0.99));
    printf("\"itl_us\":[%u,%u],", value_at(gaps, 0.5), value_at(gaps, 0.99));
    if (ttft_count) printf("\"ttft_us\":[%u,%u],", ttfts[ttft_count / 2], ttfts[ttft_count * 99 / 100]);
    printf("\"cpu\":{");
    for (int i = 0; i < watched_count; i++) {
        Watched *w = &watched[i];
        printf("%s\"%s\":{\"ns\":%llu,\"user_ticks\":%llu,\"kernel_ticks\":%llu}", i ? "," : "", w->name,
               (unsigned long long)(w->cpu_ns[1] - w->cpu_ns[0]), (unsigned long long)(w->user[1] - w->user[0]),
               (unsigned long long)(w->kernel[1] - w->kernel[0]));
    }
    printf("}}\n");
}

static void parse_watch(char *list) {
    for (char *item = strtok(list, ","); item; item = strtok(NULL, ",")) {
        Watched *w = &watched[watched_count++];
        char *equals = strchr(item, '=');
        if (!equals || watched_count == 16) die("load: --watch takes name=pid,name=pid");
        *equals = 0;
        snprintf(w->name, sizeof w->name, "%s", item);
        w->pid = atoi(equals + 1);
        if (clock_getcpuclockid(w->pid, &w->clock)) die("load: no process %d", w->pid);
    }
}

static void parse(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *flag = argv[i];
        if (!strcmp(flag, "--hold")) {
            o.hold = true;
            continue;
        }
        char *value = ++i < argc ? argv[i] : "";
        if (!strcmp(flag, "--target")) {
            char *colon = strchr(value, ':');
            if (!colon) die("load: --target takes host:port");
            *colon = 0;
            o.host = value;
            o.port = atoi(colon + 1);
        } else if (!strcmp(flag, "--kind")) o.ws = !strcmp(value, "ws");
        else if (!strcmp(flag, "--key")) o.key = value;
        else if (!strcmp(flag, "--model")) o.model = value;
        else if (!strcmp(flag, "--mode")) o.mode = value;
        else if (!strcmp(flag, "--control")) o.control = value;
        else if (!strcmp(flag, "--watch")) parse_watch(value);
        else if (!strcmp(flag, "--streams")) o.streams = (uint32_t)atoi(value);
        else if (!strcmp(flag, "--per-socket")) o.per_socket = (uint32_t)atoi(value);
        else if (!strcmp(flag, "--per-connection")) o.per_connection = (uint32_t)atoi(value);
        else if (!strcmp(flag, "--window")) o.window = (uint32_t)atoi(value);
        else if (!strcmp(flag, "--tokens")) o.tokens = (uint32_t)atoi(value);
        else if (!strcmp(flag, "--total")) o.total = (uint32_t)atoi(value);
        else if (!strcmp(flag, "--open-every-us")) o.open_every_us = (uint32_t)atoi(value);
        else if (!strcmp(flag, "--rate")) o.rate = atof(value);
        else if (!strcmp(flag, "--seconds")) o.seconds = atof(value);
        else if (!strcmp(flag, "--settle")) o.settle = atof(value);
        else die("load: unknown flag %s", flag);
    }
    if (!o.ws) o.per_socket = 1;
    if (!!o.total + (o.seconds > 0) + o.hold != 1) die("load: one of --seconds, --total and --hold is needed");
    if (o.total && !o.tokens) die("load: --total needs --tokens");
    if (!o.total && !o.control) die("load: without --control nobody ends the streams");
    if (o.streams > STREAMS_MAX) die("load: more than %d streams", STREAMS_MAX);
}

int main(int argc, char **argv) {
    parse(argc, argv);
    signal(SIGPIPE, SIG_IGN);
    raise_file_limit();
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (o.control) {
        struct sockaddr_un path = control_address(o.control);
        control_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        if (connect(control_fd, (struct sockaddr *)&path, sizeof path)) die("load: no engine at %s", o.control);
    }
    /* --per-socket 0: sockets without streams; --streams counts the sockets then */
    uint32_t each = o.per_socket ? o.per_socket : 1;
    conn_count = (o.streams + each - 1) / each;
    conns = calloc(conn_count, sizeof *conns);
    for (uint32_t i = 0; i < conn_count; i++) conns[i].streams = calloc(each, sizeof(Stream));
    uint32_t due = o.per_socket ? conn_count * each : 0; /* steady streams */
    uint32_t opened = 0;
    uint64_t open_at = now_ns(), measure_at = 0;
    bool told = false, finishing = false;
    progress_ns = now_ns();
    if (o.total) {
        measuring = true;
        snapshot(0);
    }
    for (;;) {
        uint64_t now = now_ns();
        while (opened < conn_count && open_at <= now) {
            connect_one(&conns[opened++]);
            open_at += (uint64_t)o.open_every_us * 1000;
        }
        if (o.total && completed == o.total) break;
        bool all_open = opened == conn_count && first_seen >= due && (!o.ws || greeted >= conn_count);
        bool finish = false;
        if (all_open && o.seconds > 0 && !finishing) {
            if (!measure_at) measure_at = now + (uint64_t)(o.settle * 1e9);
            if (!measuring && now >= measure_at) {
                measuring = true;
                snapshot(0);
            }
            if (measuring && now >= window_ns[0] + (uint64_t)(o.seconds * 1e9)) finish = true;
        }
        if (all_open && o.hold && !told) {
            told = true;
            printf("{\"open\":%u}\n", o.per_socket ? due : conn_count);
            fflush(stdout);
            struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
            epoll_ctl(epoll_fd, EPOLL_CTL_ADD, 0, &event);
        }
        struct epoll_event events[512];
        uint64_t wait = 200 * 1000000u;
        if (opened < conn_count) wait = open_at > now ? open_at - now : 0;
        else if (all_open && o.seconds > 0 && !finishing) {
            uint64_t at = measuring ? window_ns[0] + (uint64_t)(o.seconds * 1e9) : measure_at;
            uint64_t left = at > now ? at - now : 0;
            if (left < wait) wait = left;
        }
        struct timespec timeout = {(time_t)(wait / 1000000000u), (long)(wait % 1000000000u)};
        int n = epoll_pwait2(epoll_fd, events, 512, &timeout, NULL);
        for (int i = 0; i < n; i++) {
            if (events[i].data.ptr) {
                conn_event(events[i].data.ptr, events[i].events);
            } else { /* a line on stdin, or its end */
                epoll_ctl(epoll_fd, EPOLL_CTL_DEL, 0, NULL);
                finish = true;
            }
        }
        if (finish && !finishing) {
            snapshot(1);
            measuring = false;
            finishing = true;
            for (uint32_t i = 0; i < due; i++) ack(i | CONTROL_FINISH);
        }
        acks_flush();
        if (finishing && completed == due) break;
        if ((!told || finishing) && now_ns() - progress_ns > 20 * 1000000000ull)
            die("load: nothing came for 20 s: %u connections, %u streams began, %u ended", opened, first_seen, completed);
    }
    if (o.total) snapshot(1);
    print_result();
    return 0;
}
