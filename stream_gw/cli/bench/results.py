"""Results of a run: figures by stage and over time, and what the disturbances showed. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from stream_gw.cli.bench.arrivals import Stage
from stream_gw.cli.bench.measures import Histogram, Quantiles, quantile, quantiles_of
from stream_gw.cli.bench.reading import Outcome
from stream_gw.cli.bench.target import Facts

_BINS_MOST = 120


class Prices(msgspec.Struct, frozen=True):
    """Prices in US dollars; 0: not known."""

    per_million_input: float = 0.0
    per_million_output: float = 0.0
    per_hour: float = 0.0
    """Price of the whole fleet."""


class StageFigures(msgspec.Struct):
    """Figures of the requests that began while a stage held its load. Latencies are of undisturbed requests."""

    name: str
    hold_s: float
    requests: int
    completed: int
    failed: int
    cancelled: int
    errors: dict[str, int]
    requests_per_s: float
    """Requests that ended without a failure while the load was held."""
    output_tokens_per_s: float
    """Tokens that came while the load was held."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: Quantiles
    gap: Quantiles
    """Time between two pieces of text, as a reader sees them."""
    itl: Quantiles
    """Mean time of a token after the first, of each request."""
    e2e: Quantiles
    sessions: int
    usd_per_session: float | None


class Disturbances(msgspec.Struct):
    """Requests that the run disturbed, and their ends."""

    cut: int
    resumed: int
    exact: int
    """Cut answers whose text equals the replay of the whole stream."""
    resume: Quantiles
    cancelled: int
    exact_cancels: int
    named_cancels: int
    """Cancels for which the server named the last token."""
    cancel: Quantiles
    slow: int
    slow_completed: int


class Bin(msgspec.Struct):
    """A part of the run's time. Requests are counted where they began, pieces where they came."""

    at_s: float
    began: int = 0
    failed: int = 0
    pieces: int = 0
    """Pieces of text."""
    running: int = 0
    """Requests that ran at its end."""
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    gap_p99_s: float | None = None


class Report(msgspec.Struct):
    """Everything that a run says, as ``--json`` writes it."""

    version: str
    python: str
    machine: str
    started_at: str
    command: str
    target: Facts
    profile: str
    transport: str
    seed: int
    prompts_sha256: str
    """Digest of the prompts in the order in which they were sent."""
    first_prompt: str
    wanted_s: float
    took_s: float
    is_whole: bool
    """The run was not interrupted."""
    unfinished: int
    """Requests that ran when it was interrupted. No figure but ``bins`` contains them."""
    client_lag_p99_s: float
    """Delay of the measuring process itself: its event loop's, every 50 ms."""
    client_cpu_share: float
    """CPU time of the measuring process, of one core."""
    stages: list[StageFigures]
    disturbances: Disturbances
    bin_s: float
    bins: list[Bin]
    requests: list[Outcome]

    @property
    def failed(self) -> int:
        """Requests that failed, also those of a ramp."""
        return sum(one.status == "failed" for one in self.requests)

    @property
    def inexact(self) -> int:
        """Answers that were cut or cancelled and are not what they should be."""
        found = self.disturbances
        return (found.cut - found.exact) + (found.named_cancels - found.exact_cancels)


class _Window:
    """The time in which a stage held its load, and what happened in it. Times are from the run's start."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin_s, self.end_s = begin_s, end_s
        self.pieces = 0
        self.ended = 0

    def holds(self, at_s: float) -> bool:
        return self.begin_s <= at_s < self.end_s


class Record:
    """Collects the outcomes of a run. Throughput is counted in the time in which a stage held its load."""

    def __init__(self, stages: Sequence[Stage], prices: Prices) -> None:
        self.stages, self._prices = stages, prices
        self.outcomes: list[Outcome] = []
        self.failed = 0
        """Failures among them. The progress shows it, and a walk over a long soak's outcomes would delay the reads."""
        self.ttft_s: list[float] = []
        """TTFT of the counted requests so far, in order of their end."""
        self._gaps = [Histogram() for _ in stages]
        self._windows: list[_Window] = []
        wanted_s = sum(stage.length_s for stage in stages)
        self.bin_s = max(1.0, wanted_s / _BINS_MOST)
        self._bin_gaps: dict[int, Histogram] = {}
        self._bin_pieces: Counter[int] = Counter()
        self._bin_running: dict[int, int] = {}

    def begin_stage(self, at_s: float) -> None:
        stage = self.stages[len(self._windows)]
        self._windows.append(_Window(at_s + stage.ramp_s, at_s + stage.length_s))

    def end_stage(self, at_s: float) -> None:
        """Note a stage's end, which a limit of requests or the user may bring early."""
        if self._windows:
            self._windows[-1].end_s = min(self._windows[-1].end_s, at_s)

    def note_piece(self, at_s: float) -> None:
        if self._windows and self._windows[-1].holds(at_s):
            self._windows[-1].pieces += 1
        self._bin_pieces[int(at_s / self.bin_s)] += 1

    def note_running(self, at_s: float, running: int) -> None:
        self._bin_running[int(at_s / self.bin_s)] = running

    def add(self, outcome: Outcome, gaps: Histogram) -> None:
        """Take a request that has ended, with the times between its pieces."""
        self.outcomes.append(outcome)
        self.failed += outcome.status == "failed"
        for window in self._windows[-1:]:
            window.ended += outcome.status != "failed" and window.holds(outcome.began_s + outcome.duration_s)
        if outcome.is_counted:
            self._gaps[outcome.stage].merge(gaps)
            if outcome.ttft_s is not None:
                self.ttft_s.append(outcome.ttft_s)
        began = int(outcome.began_s / self.bin_s)
        self._bin_gaps.setdefault(began, Histogram()).merge(gaps)

    def figures(self) -> list[StageFigures]:
        return [self._stage_figures(number, stage) for number, stage in enumerate(self.stages)]

    def _stage_figures(self, number: int, stage: Stage) -> StageFigures:
        all_ = [one for one in self.outcomes if one.stage == number and one.is_counted]
        done = [one for one in all_ if one.status != "failed"]
        calm = [one for one in done if not one.disturbance]
        times = [one.ttft_s for one in done if one.ttft_s is not None and not one.disturbance.is_slow]
        prompt, output = sum(one.prompt_tokens for one in all_), sum(one.output_tokens for one in all_)
        sessions = len({one.session for one in all_})
        window = self._windows[number] if number < len(self._windows) else _Window(0.0, 0.0)
        hold_s = max(window.end_s - window.begin_s, 1e-9)
        tokens_a_piece = output / max(sum(one.pieces for one in all_), 1)
        return StageFigures(
            name=stage.name,
            hold_s=hold_s,
            requests=len(all_),
            completed=sum(one.status == "completed" for one in all_),
            failed=len(all_) - len(done),
            cancelled=sum(one.status == "cancelled" for one in all_),
            errors=dict(Counter(one.error for one in all_ if one.status == "failed").most_common()),
            requests_per_s=window.ended / hold_s,
            output_tokens_per_s=window.pieces * tokens_a_piece / hold_s,
            prompt_tokens=prompt,
            cached_tokens=sum(one.cached_tokens for one in all_),
            output_tokens=output,
            ttft=quantiles_of(times),
            gap=self._gaps[number].quantiles(),
            itl=quantiles_of(one.itl_s for one in calm if one.itl_s is not None),
            e2e=quantiles_of(one.duration_s for one in calm),
            sessions=sessions,
            usd_per_session=self._usd(prompt, output, hold_s) / sessions if sessions and self._has_prices else None,
        )

    @property
    def _has_prices(self) -> bool:
        return self._prices != Prices()

    def _usd(self, prompt: int, output: int, hold_s: float) -> float:
        prices = self._prices
        tokens = prompt * prices.per_million_input + output * prices.per_million_output
        return tokens / 1e6 + prices.per_hour * hold_s / 3600

    def disturbances(self) -> Disturbances:
        cut = [one for one in self.outcomes if one.cuts]
        cancelled = [one for one in self.outcomes if one.cancel_s is not None and one.status == "cancelled"]
        slow = [one for one in self.outcomes if one.disturbance.is_slow]
        return Disturbances(
            cut=len(cut),
            resumed=sum(one.resume_s is not None for one in cut),
            exact=sum(one.is_exact is True for one in cut),
            resume=quantiles_of(one.resume_s for one in cut if one.resume_s is not None),
            cancelled=len(cancelled),
            exact_cancels=sum(one.is_cancel_exact is True for one in cancelled),
            named_cancels=sum(one.is_cancel_exact is not None for one in cancelled),
            cancel=quantiles_of(one.cancel_s for one in cancelled if one.cancel_s is not None),
            slow=len(slow),
            slow_completed=sum(one.status == "completed" for one in slow),
        )

    def bins(self) -> list[Bin]:
        """Figures over time, from the start to the last request's end."""
        begun: dict[int, list[Outcome]] = {}
        for one in self.outcomes:
            begun.setdefault(int(one.began_s / self.bin_s), []).append(one)
        last = max([*begun, *self._bin_pieces, *self._bin_running], default=-1)
        return [self._bin(number, begun.get(number, ())) for number in range(last + 1)]

    def _bin(self, number: int, some: Sequence[Outcome]) -> Bin:
        times = sorted(one.ttft_s for one in some if one.ttft_s is not None)
        gaps = self._bin_gaps.get(number)
        return Bin(
            number * self.bin_s,
            len(some),
            sum(one.status == "failed" for one in some),
            self._bin_pieces[number],
            self._bin_running.get(number, 0),
            quantile(times, 0.5) if times else None,
            quantile(times, 0.99) if times else None,
            gaps.quantile_s(0.99) if gaps is not None and gaps.count else None,
        )
