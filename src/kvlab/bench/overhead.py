"""What the engine adds to plain ``generate``: one stream, one process, one after the other."""

import statistics
from functools import partial

from kvlab.bench.checks import Check
from kvlab.budget import run_under_budget
from kvlab.meter import Meter

LIMIT = 1.05
BUDGET_BYTES = 2**30


def engine_overhead(model: str, device: str, *, tokens: int, pairs: int) -> Check:
    """The median over pairs of (time of the engine) / (time of generate) for the same greedy text."""
    work = partial(_timed_pairs, model=model, tokens=tokens, pairs=pairs)
    outcome = run_under_budget(work, budget_bytes=BUDGET_BYTES, device=device, timeout_s=600)
    if not outcome.ok:
        raise RuntimeError(outcome.error.traceback or outcome.error.message)
    ratios = [engine_s / generate_s for generate_s, engine_s in outcome.value]
    ratio = statistics.median(ratios)
    per_token_s = statistics.median(generate_s for generate_s, _ in outcome.value) / tokens
    return Check(
        promise=f"engine: times the time of plain generate, {tokens} tokens of {model} (at most)",
        measured=ratio,
        limit=LIMIT,
        holds=ratio <= LIMIT,
        reason=f"median of {pairs} pairs from {min(ratios):.3f} to {max(ratios):.3f}; "
        f"generate takes {per_token_s * 1e3:.1f} ms a token",
    )


def _timed_pairs(meter: Meter, model: str, tokens: int, pairs: int) -> list[tuple[float, float]]:
    """Seconds of generate and of the engine, in turns; the engine speaks through a pipe, as it does in a service."""
    import queue
    import threading
    from multiprocessing import Pipe

    import torch
    from transformers import DynamicCache

    from kvlab.bench.cache import timed
    from kvlab.model import load_model
    from kvlab.service.engine import Engine
    from kvlab.service.messages import Start, Stop
    from kvlab.service.settings import EngineSettings

    loaded = load_model(model, meter.device)
    settings = EngineSettings(model=model, policy="growing", budget_bytes=meter.budget_bytes)
    ids = torch.arange(100, 132, device=meter.device)[None]
    receiver, sender = Pipe(duplex=False)
    said: list[object] = []

    def listen() -> None:
        while (message := receiver.recv()) is not None:
            said.append(message)

    threading.Thread(target=listen, daemon=True).start()

    def generate() -> list[int]:
        cache = DynamicCache(config=loaded.config)
        options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
        with torch.inference_mode():
            return loaded.generate(ids, cache=cache, **options)[0, ids.shape[1] :].tolist()

    def engine() -> None:
        commands: queue.SimpleQueue = queue.SimpleQueue()
        commands.put(Start(1, ids.int().cpu().numpy().tobytes(), tokens, 0.0, None, ()))
        commands.put(Stop())
        running.stopping = False
        running.run(commands)

    running = Engine(loaded, settings, meter, lambda kind, content: sender.send(content))
    expected = generate()
    engine()
    meter.arm()
    times = [(timed(generate, meter.device), timed(engine, meter.device)) for _ in range(pairs)]
    sender.send(None)
    texts = [token for round in said for _, token in round.tokens]
    assert texts[:tokens] == expected, "the engine and generate do not write the same text"
    return times
