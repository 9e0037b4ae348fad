"""A helper process of a rank: compiles the islands that arrive on stdin into Inductor's cache.

    python -m zgraph.codegen.ahead.helper PID

It joins no process group, and ends with the process PID, whose child it is.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from typing import IO

from torch import fx

from zgraph.graph import meta, pickled
from zgraph.torch_compat.fake_values import step_mode
from zgraph.torch_compat.inductor import adopt_settings, compile_with_inductor, graphs_from_cache

_LOOKS_S = 0.5  # between looks at the parent


def compile_island(content: bytes) -> bool:
    """Compile a pickled island (run of compute); return False if it was in the cache already."""
    loaded = pickled.loads(content, step_mode())
    gm = fx.GraphModule(loaded, loaded.graph)  # its class is part of the key
    before = graphs_from_cache()
    compile_with_inductor(gm, list(map(meta.value, gm.graph.find_nodes(op="placeholder"))))
    return graphs_from_cache() == before


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Adopt the settings that arrive first, then compile one island after another until an empty request."""
    adopt_settings(pickle.loads(pickle.load(requests)))
    pickle.dump((True, ""), answers)
    answers.flush()
    while content := pickle.load(requests):
        try:
            answer = compile_island(content), ""
        except Exception:
            answer = False, traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


def end_with(parent: int) -> None:
    """End this process and the compilers that it has started as soon as its parent has ended.

    SIGTERM lets compilers remove what they have half written.
    """
    while os.getppid() == parent:
        time.sleep(_LOOKS_S)
    os.killpg(0, signal.SIGTERM)
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    threading.Thread(target=end_with, args=(int(sys.argv[1]),), daemon=True).start()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for whatever a compiler prints
    try:
        serve(sys.stdin.buffer, answers)
    except (EOFError, BrokenPipeError):
        os._exit(1)  # the parent has ended
    os._exit(0)  # nothing is worth a clean end of the interpreter, which takes seconds


if __name__ == "__main__":
    main()
