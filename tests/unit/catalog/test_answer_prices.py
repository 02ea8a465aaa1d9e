"""Prices that are loaded on first use."""

import os
import subprocess
import sys

_PROGRAM = """
import os, signal, threading
from stenolog.catalog import answer_prices

parent, is_loading, may_end = os.getpid(), threading.Event(), threading.Event()

def load():
    if os.getpid() == parent:
        is_loading.set()
        may_end.wait(60)

answer_prices.load_prices = load
thread = threading.Thread(target=answer_prices.LazyPrices(), args=("model", {}))
thread.start()
is_loading.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    answer_prices.LazyPrices()("model", {})
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
may_end.set()
thread.join()
"""


def test_p8_child_forked_while_prices_are_loaded_can_price_an_answer() -> None:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stdout == "0\n"
