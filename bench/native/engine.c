/* A fake OpenAI-compatible engine: costs next to nothing, writes what vLLM would write.
 *
 *   engine --port 9000 --control /tmp/x.sock [--steps /tmp/y.sock] [--mode phase] [--rate 50] [--tokens 128]
 *
 * With --steps it also serves an agent that listens at that socket, as a vLLM with stream-gw's plug-in does
 * (inference/engines/plugin/stream_gw_steps.py): what one turn of the loop makes is one message.
 *
 * The request chooses by its prompt, because that is what every proxy hands on untouched:
 * "bench mode=<mode> rate=<tokens/s> window=<n> stream=<number>". What is absent comes from the flags.
 *
 *   step     every stream's token at the same instants, as a batching engine's step does
 *   phase    every stream at its own random phase
 *   closed   `window` tokens, then the next one as soon as the reader says (control socket) that it has one
 *   backlog  as fast as the socket takes
 *   idle     one token, then silence
 *
 * A token is " t<index>@<send time, us of CLOCK_MONOTONIC, hex>": its order and its delay can be checked anywhere.
 */
#include "net.h"

enum mode { STEP, PHASE, CLOSED, BACKLOG, IDLE };
static const char *const MODES[] = {"step", "phase", "closed", "backlog", "idle"};

typedef struct conn {
    int fd;
    bool dead, streaming, usage, finish, want_write, by_steps;
    uint32_t number; /* of the request on the step socket */
    enum mode mode;
    Buffer in, out;
    uint32_t stream, sent, tokens;
    uint64_t due, period;
    struct conn *before, *after; /* the timer list */
    struct conn *next_dead;
    size_t prefix_size;
    char prefix[224];
} Conn;

static const char SUFFIX[] = "\"},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}]}\n\n\r\n";

static int epoll_fd, control_fd = -1;
static enum mode mode_default = PHASE;
static double rate_default = 50;
static uint32_t tokens_default = 128;
static Conn *by_stream[STREAMS_MAX];
static Conn *by_number[STREAMS_MAX]; /* of the step socket */
static Conn *dead_list;
/* Due times are nearly sorted as they come (now + a period), so a list filled from its tail beats a heap. */
static Conn timers = {.before = &timers, .after = &timers};

static void timer_remove(Conn *c) {
    if (!c->after) return;
    c->before->after = c->after;
    c->after->before = c->before;
    c->before = c->after = NULL;
}

static void timer_insert(Conn *c) {
    Conn *at = timers.before;
    while (at != &timers && at->due > c->due) at = at->before;
    c->before = at;
    c->after = at->after;
    at->after->before = c;
    at->after = c;
}

static void conn_kill(Conn *c) {
    if (c->dead) return;
    c->dead = true;
    timer_remove(c);
    if (by_stream[c->stream] == c) by_stream[c->stream] = NULL;
    if (c->by_steps)
        by_number[c->number % STREAMS_MAX] = NULL;
    else
        close(c->fd);
    c->next_dead = dead_list; /* freed after the batch of events that may still name it */
    dead_list = c;
}

static void watch(Conn *c, bool write) {
    if (c->want_write == write) return;
    c->want_write = write;
    struct epoll_event event = {.events = EPOLLIN | (write ? EPOLLOUT : 0u), .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
}

static void conn_write(Conn *c, const char *data, size_t size) {
    if (c->dead) return;
    if (!c->out.used) {
        ssize_t n = send(c->fd, data, size, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN) {
            conn_kill(c);
            return;
        }
        if (n > 0) {
            data += n;
            size -= (size_t)n;
        }
    }
    if (size) {
        buffer_put(&c->out, data, size);
        watch(c, true);
    }
}

/* --- the step socket ------------------------------------------------------------------------------------- */

enum kind { HELLO, ASK, LEAVE, HEAD_OF, BODY, END, BROKEN };
#define RECORD_SIZE 9 /* size of the payload, number of the request, kind: little-endian */
#define RETRY_NS 100000000u

static const char *step_path;
static int step_fd = -1;
static bool step_waits; /* for room in the socket */
static uint64_t step_retry;
static Buffer step_in, step_out;

static void put_record(uint32_t number, enum kind kind, const char *payload, size_t size) {
    uint32_t sizes[2] = {(uint32_t)size, number};
    char what = (char)kind;
    buffer_put(&step_out, sizes, sizeof sizes);
    buffer_put(&step_out, &what, 1);
    buffer_put(&step_out, payload, size);
}

static void step_watch(bool write) {
    if (step_waits == write) return;
    step_waits = write;
    struct epoll_event event = {.events = EPOLLIN | (write ? EPOLLOUT : 0u), .data.ptr = &step_fd};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, step_fd, &event);
}

static void step_lose(void) {
    close(step_fd);
    step_fd = -1;
    step_waits = false;
    step_retry = now_ns() + RETRY_NS;
    buffer_free(&step_in);
    buffer_free(&step_out);
    for (int i = 0; i < STREAMS_MAX; i++)
        if (by_number[i]) conn_kill(by_number[i]);
}

static void step_flush(void) {
    if (step_fd < 0 || !step_out.used) return;
    ssize_t n = send(step_fd, step_out.at, step_out.used, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN) {
        step_lose();
        return;
    }
    if (n > 0) buffer_drop(&step_out, (size_t)n);
    step_watch(step_out.used != 0);
}

static void step_connect(void) {
    struct sockaddr_un address = control_address(step_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) {
        close(fd);
        step_retry = now_ns() + RETRY_NS;
        return;
    }
    step_fd = fd;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &step_fd};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, step_fd, &event);
    put_record(0, HELLO, "1", 1);
}

/* --- answers --------------------------------------------------------------------------------------------- */

static void write_chunk(Conn *c, const char *data, size_t size) {
    char chunk[768];
    if (c->by_steps) {
        put_record(c->number, BODY, data, size);
        return;
    }
    int n = snprintf(chunk, sizeof chunk, "%zx\r\n%.*s\r\n", size, (int)size, data);
    conn_write(c, chunk, (size_t)n);
}

static void write_token(Conn *c) {
    char chunk[512], *p = chunk + 8; /* room for the size line */
    memcpy(p, c->prefix, c->prefix_size);
    p += c->prefix_size;
    p += sprintf(p, " t%u@%llx", c->sent++, (unsigned long long)(now_ns() / 1000));
    memcpy(p, SUFFIX, sizeof SUFFIX - 1);
    p += sizeof SUFFIX - 1;
    size_t payload = (size_t)(p - chunk) - 8 - 2;
    if (c->by_steps) {
        put_record(c->number, BODY, chunk + 8, payload);
        return;
    }
    char size_line[8];
    int digits = snprintf(size_line, sizeof size_line, "%zx\r\n", payload);
    char *start = chunk + 8 - digits;
    memcpy(start, size_line, (size_t)digits);
    conn_write(c, start, (size_t)(p - start));
}

static void end_stream(Conn *c) {
    char data[640];
    int n;
    int head = (int)c->prefix_size - (int)strlen("{\"content\":\"");
    timer_remove(c);
    c->streaming = false;
    if (by_stream[c->stream] == c) by_stream[c->stream] = NULL;
    if (c->finish) { /* the reader could not know how many would come */
        n = snprintf(data, sizeof data, "%.*s z%u%.*s", (int)c->prefix_size, c->prefix, c->sent, (int)sizeof SUFFIX - 3, SUFFIX);
        write_chunk(c, data, (size_t)n);
    }
    n = snprintf(data, sizeof data,
                 "%.*s{},\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,\"token_ids\":null}]}\n\n",
                 head, c->prefix);
    write_chunk(c, data, (size_t)n);
    if (c->usage) {
        int id_end = (int)((char *)memmem(c->prefix, c->prefix_size, "\"choices\"", 9) - c->prefix);
        n = snprintf(data, sizeof data,
                     "%.*s\"choices\":[],\"usage\":{\"prompt_tokens\":16,\"total_tokens\":%u,\"completion_tokens\":%u}}\n\n",
                     id_end, c->prefix, 16 + c->sent, c->sent);
        write_chunk(c, data, (size_t)n);
    }
    write_chunk(c, "data: [DONE]\n\n", 14);
    if (c->by_steps) {
        put_record(c->number, END, "", 0);
        conn_kill(c);
        return;
    }
    conn_write(c, "0\r\n\r\n", 5);
}

/* One token, and the end when it was the last. */
static void step(Conn *c) {
    write_token(c);
    if (!c->dead && c->sent >= c->tokens) end_stream(c);
}

static void pour(Conn *c) {
    while (c->streaming && !c->dead && (c->by_steps || !c->out.used)) step(c);
}

static uint32_t number_after(const char *from, const char *key, uint32_t otherwise) {
    const char *at = strstr(from, key);
    if (!at) return otherwise;
    at += strlen(key);
    while (*at == ' ' || *at == ':' || *at == '"') at++;
    return *at >= '0' && *at <= '9' ? (uint32_t)strtoul(at, NULL, 10) : otherwise;
}

static void start_stream(Conn *c, const char *body) {
    static const char HEAD[] =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    static const char STEP_HEAD[] = "{\"status\":200,\"headers\":{\"content-type\":\"text/event-stream; charset=utf-8\"}}";
    char data[512];
    double rate = rate_default;
    uint32_t window = 1;
    c->mode = mode_default;
    c->stream = 0;
    c->tokens = number_after(body, "\"max_tokens\"", number_after(body, "\"max_completion_tokens\"", tokens_default));
    c->usage = strstr(body, "\"include_usage\":true") || strstr(body, "\"include_usage\": true");
    const char *order = strstr(body, "bench mode=");
    if (order) {
        for (int m = STEP; m <= IDLE; m++)
            if (!strncmp(order + 11, MODES[m], strlen(MODES[m]))) c->mode = (enum mode)m;
        const char *at = strstr(order, "rate=");
        if (at) rate = strtod(at + 5, NULL);
        window = number_after(order, "window=", 1);
        c->stream = number_after(order, "stream=", 0) % STREAMS_MAX;
    }
    c->sent = 0;
    c->streaming = true;
    c->finish = false;
    by_stream[c->stream] = c;
    c->prefix_size = (size_t)snprintf(
        c->prefix, sizeof c->prefix,
        "data: {\"id\":\"chatcmpl-%08x%08x%08x%08x\",\"object\":\"chat.completion.chunk\",\"created\":%lld,\"model\":\"bench\","
        "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"",
        rand(), rand(), rand(), c->stream, (long long)time(NULL));
    if (c->by_steps)
        put_record(c->number, HEAD_OF, STEP_HEAD, sizeof STEP_HEAD - 1);
    else
        conn_write(c, HEAD, sizeof HEAD - 1);
    int n = snprintf(data, sizeof data, "%.*s{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n",
                     (int)c->prefix_size - (int)strlen("{\"content\":\""), c->prefix);
    write_chunk(c, data, (size_t)n);
    if (c->mode == BACKLOG) {
        pour(c);
        return;
    }
    step(c); /* the first token is prefill's and keeps no pace */
    for (uint32_t i = 1; c->mode == CLOSED && i < window && c->streaming && !c->dead; i++) step(c);
    if (c->dead || !c->streaming || (c->mode != STEP && c->mode != PHASE)) return;
    c->period = (uint64_t)(1e9 / rate);
    if (c->mode == STEP)
        c->due = (now_ns() / c->period + 1) * c->period;
    else
        c->due = now_ns() + (uint64_t)((double)rand() / RAND_MAX * (double)c->period);
    timer_insert(c);
}

static void answer(Conn *c, const char *status, const char *body) {
    char data[512];
    int n = snprintf(data, sizeof data, "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", status,
                     strlen(body), body);
    conn_write(c, data, (size_t)n);
}

/* One request, if it is whole. Pipelining is not served: nobody asks for it. */
static void receive_request(Conn *c) {
    buffer_put(&c->in, "", 1); /* so that the string functions stop */
    c->in.used--;
    char *end = strstr(c->in.at, "\r\n\r\n");
    if (!end) return;
    size_t head = (size_t)(end - c->in.at) + 4, size = 0;
    *end = 0;
    for (char *p = c->in.at; (p = strchr(p, '\n')); p++) {
        if (!strncasecmp(p + 1, "content-length:", 15)) size = strtoul(p + 16, NULL, 10);
        if (!strncasecmp(p + 1, "transfer-encoding:", 18)) die("engine: a request with a chunked body");
        if (!strncasecmp(p + 1, "expect:", 7)) die("engine: a request that expects 100-continue");
    }
    *end = '\r';
    if (c->in.used < head + size) return;
    if (!strncmp(c->in.at, "POST /v1/chat/completions ", 26))
        start_stream(c, c->in.at + head);
    else if (!strncmp(c->in.at, "GET /v1/models ", 15))
        answer(c, "200 OK", "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\",\"created\":0,\"owned_by\":\"bench\"}]}");
    else if (!strncmp(c->in.at, "GET /health ", 12))
        answer(c, "200 OK", "{}");
    else
        answer(c, "404 Not Found", "{\"error\":{\"message\":\"no such page\",\"type\":\"invalid_request_error\",\"code\":404}}");
    buffer_free(&c->in);
}

static void conn_event(Conn *c, uint32_t events) {
    if (c->dead) return;
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        for (;;) {
            buffer_reserve(&c->in, 4096);
            ssize_t n = recv(c->fd, c->in.at + c->in.used, c->in.room - c->in.used - 1, 0);
            if (n > 0) {
                c->in.used += (size_t)n;
                continue;
            }
            if (n < 0 && errno == EAGAIN) break;
            conn_kill(c);
            return;
        }
        if (c->in.used) receive_request(c);
    }
    if (!c->dead && events & EPOLLOUT && c->out.used) {
        ssize_t n = send(c->fd, c->out.at, c->out.used, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN) {
            conn_kill(c);
            return;
        }
        if (n > 0) buffer_drop(&c->out, (size_t)n);
        if (!c->out.used) {
            watch(c, false);
            if (c->mode == BACKLOG) pour(c);
        }
    }
}

static void step_ask(uint32_t number, const char *payload, size_t size) {
    const char *body = memchr(payload, '\n', size);
    if (!body || memcmp(payload, "{\"path\":\"/v1/chat/completions\"", 30)) die("engine: only chat is served by steps");
    char *copy = strndup(body, size - (size_t)(body - payload)); /* ends with a zero for the string functions */
    Conn *c = calloc(1, sizeof *c);
    c->fd = -1;
    c->by_steps = true;
    c->number = number;
    if (by_number[number % STREAMS_MAX]) die("engine: too many requests on the step socket");
    by_number[number % STREAMS_MAX] = c;
    start_stream(c, copy);
    free(copy);
}

static void step_event(uint32_t events) {
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        buffer_reserve(&step_in, 1 << 16);
        ssize_t n = recv(step_fd, step_in.at + step_in.used, step_in.room - step_in.used, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN)) {
            step_lose();
            return;
        }
        if (n > 0) step_in.used += (size_t)n;
        size_t at = 0;
        while (step_in.used - at >= RECORD_SIZE) {
            uint32_t sizes[2];
            memcpy(sizes, step_in.at + at, sizeof sizes);
            if (step_in.used - at < RECORD_SIZE + sizes[0]) break;
            Conn *c = by_number[sizes[1] % STREAMS_MAX];
            if (step_in.at[at + 8] == ASK)
                step_ask(sizes[1], step_in.at + at + RECORD_SIZE, sizes[0]);
            else if (step_in.at[at + 8] == LEAVE && c && c->number == sizes[1])
                conn_kill(c);
            at += RECORD_SIZE + sizes[0];
        }
        buffer_drop(&step_in, at);
    }
}

static void control_event(void) {
    uint32_t items[CONTROL_ITEMS_MAX];
    ssize_t n;
    while ((n = recv(control_fd, items, sizeof items, MSG_DONTWAIT)) > 0)
        for (size_t i = 0; i < (size_t)n / sizeof *items; i++) {
            Conn *c = by_stream[items[i] & ~CONTROL_FINISH];
            if (!c || !c->streaming) continue;
            if (items[i] & CONTROL_FINISH) {
                c->finish = true;
                end_stream(c);
            } else if (c->mode == CLOSED) {
                step(c);
            }
        }
}

static void accept_all(int listener) {
    int fd, on = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        Conn *c = calloc(1, sizeof *c);
        c->fd = fd;
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    }
}

static void run_timers(void) {
    uint64_t now = now_ns();
    while (timers.after != &timers && timers.after->due <= now) {
        Conn *c = timers.after;
        timer_remove(c);
        step(c);
        if (c->dead || !c->streaming) continue;
        c->due += c->period;
        timer_insert(c);
    }
}

int main(int argc, char **argv) {
    int port = 0, on = 1;
    const char *control = NULL;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--port")) port = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--control")) control = argv[i + 1];
        else if (!strcmp(argv[i], "--steps")) step_path = argv[i + 1];
        else if (!strcmp(argv[i], "--rate")) rate_default = atof(argv[i + 1]);
        else if (!strcmp(argv[i], "--tokens")) tokens_default = (uint32_t)atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--mode")) {
            for (int m = STEP; m <= IDLE; m++)
                if (!strcmp(argv[i + 1], MODES[m])) mode_default = (enum mode)m;
        } else die("engine: unknown flag %s", argv[i]);
    }
    if (!port) die("engine: --port is needed");
    signal(SIGPIPE, SIG_IGN);
    raise_file_limit();
    srand(1); /* the same phases every run */
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in address = loopback("127.0.0.1", port);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4096))
        die("engine: cannot listen on port %d: %s", port, strerror(errno));
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &listener};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &event);
    if (control) {
        struct sockaddr_un path = control_address(control);
        unlink(control);
        control_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        if (bind(control_fd, (struct sockaddr *)&path, sizeof path)) die("engine: cannot bind %s", control);
        event.data.ptr = &control_fd;
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, control_fd, &event);
    }
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        struct epoll_event events[512];
        struct timespec wait = {0}, *timeout = NULL;
        if (timers.after != &timers) {
            uint64_t now = now_ns(), left = timers.after->due > now ? timers.after->due - now : 0;
            wait = (struct timespec){(time_t)(left / 1000000000u), (long)(left % 1000000000u)};
            timeout = &wait;
        }
        if (step_path && step_fd < 0 && now_ns() >= step_retry) step_connect();
        step_flush();
        if (step_path && step_fd < 0 && (!timeout || timeout->tv_sec || timeout->tv_nsec > RETRY_NS)) {
            wait = (struct timespec){0, RETRY_NS};
            timeout = &wait;
        }
        int n = epoll_pwait2(epoll_fd, events, 512, timeout, NULL);
        for (int i = 0; i < n; i++) {
            if (events[i].data.ptr == &listener) accept_all(listener);
            else if (events[i].data.ptr == &control_fd) control_event();
            else if (events[i].data.ptr == &step_fd) step_event(events[i].events);
            else conn_event(events[i].data.ptr, events[i].events);
        }
        run_timers();
        while (dead_list) {
            Conn *c = dead_list;
            dead_list = c->next_dead;
            buffer_free(&c->in);
            buffer_free(&c->out);
            free(c);
        }
    }
}
