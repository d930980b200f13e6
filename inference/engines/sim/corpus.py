"""The simulator's prose, tables, functions and lists. It writes about streams, as this project's documentation does.

Some sentences have characters of two to four bytes, so that every path of a token sees them.
"""

from __future__ import annotations

OPENERS = (
    "In short:",
    "Here is the idea.",
    "One thing first.",
    "A short answer:",
    "It helps to begin with the log.",
    "Three facts explain most of it.",
    "Seen from the reader:",
    "Seen from the engine:",
    "Think of a book and a bookmark.",
    "The rule is simple.",
    "Let us follow one token.",
    "The order matters here.",
    "Start with what may fail.",
)

SENTENCES = (
    "A gateway holds only a cursor, so any other gateway can continue where it stopped.",
    "The log keeps every token until somebody has read it.",
    "A reader sees each token once and in order.",
    "A replica that dies leaves a lease, and the lease expires within seconds.",
    "Another replica then continues the same text with the rest of the budget.",
    "A slow reader costs constant memory, because the log waits for it and the gateway does not.",
    "Every append carries an epoch, and only the current epoch may write.",
    "A cancel names the last token, and nothing after it is ever delivered.",
    "Usage is counted in the script that writes the end, so a stream is billed once.",
    "The word naïve has five letters and six bytes, and a frame never splits one of them.",
    "A café in Köln and an office in 東京 read the same bytes.",
    "A browser that loses its network reconnects with its last cursor.",
    "The first token travels at once, and later ones may share a message.",
    "Load balancers need no sticky sessions.",
    "A queue has a limit, and at the limit the client is told when to come back.",
    "Placement prefers a replica that holds the prompt's prefix in its cache.",
    "A full replica is never chosen for its cache alone.",
    "The controller plans the number of replicas, and the agents do not wait for it.",
    "A deploy closes no answer: readers move to another gateway while the old one drains.",
    "Measured times add up, so a slow request can be explained.",
    "Every wait in the path has a timeout, and every timeout has an owner.",
    "A heartbeat tells the reader that silence is not a failure 🙂.",
    "Text in any script passes unchanged: поток, 流れる, नदी.",
    "The engine is asked to stop as soon as nobody reads.",
    "Redis may fail over, and a lost tail is sent again from the agent's memory.",
    "The gateway compares sequence numbers, which costs less than comparing text.",
    "A hole in the numbers is repaired from the log before the reader sees it.",
    "Two readers of one stream share the work of one.",
    "Keys expire by themselves, so a crash leaves nothing behind.",
    "A request with the same idempotency key finds its first answer.",
    "The agent dials out, so a GPU host needs no open port.",
    "Batches grow with the load and vanish with it.",
    "Nothing on the path of a token parses JSON.",
    "Prefill computes the prompt, and decode writes one token per step.",
    "Long prompts are computed in pieces, so that running answers keep their pace.",
    "The time to the first token is mostly waiting and prefill.",
    "The time between tokens is mostly the size of the batch.",
    "A retry before the first token is free, and after it the log decides.",
    "An error inside a stream carries a code, a reason and whether a retry helps.",
    "Interactive requests go first, and batch work yields.",
    "A tenant that sends too much is told so before its neighbours notice.",
    "Warm replicas cover the minutes that a cold one needs to start.",
    "A trace shows the edge, the queue, the engine and the network as four figures.",
    "Counters that two places change will drift, so one place owns each.",
    "The test kills processes on purpose 🚀 and compares every byte.",
    "Clocks of two machines differ, so moments are compared on one of them.",
    "A lease is renewed with the list of running streams, which repairs every count.",
    "Small messages are cheap until there are many of them.",
    "The system prefers an honest refusal to a silent delay.",
    "What cannot be measured in one run is not compared.",
    "Half of a protocol is what happens when the other side is gone.",
    "Resuming is reading from a position, and reading is cheap.",
    "A stream has one writer, any number of readers and one end.",
    "Backpressure has an everyday example: a bakery, where the baker stops kneading while the counter is full.",
    "A kitchen cooks at its own pace, and the waiter carries what the guest can eat.",
    "A reader that pauses is not pushed; it asks again when it has room.",
    "Sorted inputs are merged by looking at the first item of each.",
    "SSE is one answer per connection, and a WebSocket carries many.",
    "A gateway that is killed takes its sockets with it, and nothing else.",
)
"""A prime number of sentences, so that any step through them meets each one."""

TABLES = (
    """
| What fails | Who notices | What happens |
|---|---|---|
| gateway | its readers | they resume |
| replica | its lease | another continues |
| Redis | its clients | repeats |
""",
    """
| Transport | Good for | Resume |
|---|---|---|
| SSE | SDKs, curl | by event id |
| WebSocket | many streams | by cursor |
| plain HTTP | short answers | by key |
""",
    """
| Tier | Waits | Yields |
|---|---:|---|
| interactive | 0.2 s | never |
| standard | 2 s | to interactive |
| batch | 60 s | to both |
""",
    """
| Step | Time | Where |
|---|---:|---|
| admission | 0.4 ms | gateway |
| placement | 0.3 ms | Redis |
| prefill | 90 ms | engine |
| delivery | 0.6 ms | gateway |
""",
    """
| Position | Epoch | Meaning |
|---|---:|---|
| 1-0 | 1 | beginning |
| 1-42 | 1 | 42 frames read |
| 2-43 | 2 | second replica |
""",
)

FUNCTIONS = (
    '''
```python
def merge(*iterators: Iterator[int]) -> Iterator[int]:
    """Yield the items of sorted iterators in order."""
    heads = [(item, it) for it in iterators if (item := next(it, None)) is not None]
    while heads:
        item, it = heads.pop(heads.index(min(heads)))
        yield item
        if (item := next(it, None)) is not None:
            heads.append((item, it))
```
''',
    '''
```python
def resume(log: list[str], cursor: int) -> list[str]:
    """Return what the reader has not seen."""
    if not 0 <= cursor <= len(log):
        raise ValueError(f"no position {cursor}")
    return log[cursor:]
```
''',
    '''
```python
def append(log: list[bytes], seq: int, frame: bytes) -> bool:
    """Append the frame if it is the next one."""
    if seq != len(log) + 1:
        return False
    log.append(frame)
    return True
```
''',
    '''
```python
def backoff_s(attempt: int, random: float) -> float:
    """Return a pause that grows and is never equal for two clients."""
    return random * min(8.0, 0.25 * 2**attempt)
```
''',
    '''
```python
def pick(replicas: dict[str, int], room: int) -> str | None:
    """Return the least loaded replica that has room."""
    name = min(replicas, key=replicas.get, default=None)
    return name if name and replicas[name] < room else None
```
''',
    '''
```python
def percentile(values: list[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
```
''',
)

LISTS = (
    """
- the log keeps the text,
- the cursor says how far a reader is,
- the lease says who may write.
""",
    """
1. Read the cursor.
2. Ask any gateway for what follows.
3. Print it and keep the new cursor.
""",
    """
- **Before the first token**: place it again.
- **After it**: continue from the log.
- **After the end**: read it from the beginning.
""",
)

HEADINGS = ("## What happens", "## Why it works", "## What it costs", "## When it fails", "## An example")
QUOTES = (
    "> A stream that was truncated never looks complete.",
    "> The reader's position belongs to the reader.",
    "> A limit without an outcome is a wish.",
)
INTRODUCTIONS = {
    "table": ("Here is a table:", "A comparison:", "In a table:", "The rows that matter:", "Side by side:"),
    "function": ("Here is a function:", "A small function:", "In Python:", "This is enough:", "One function does it:"),
    "list": ("Step by step:", "A list:", "The points in order:", "In brief:", "Remember this:"),
}

COMMON = (
    "the and that with what how why who when where which its for from not one two three does may can has have then "
    "than explain write show give make list table compare function python code each every"
)
"""Words of many texts or prompts, which say nothing about their topic."""
