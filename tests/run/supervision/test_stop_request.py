"""A signal that leaves time to save does not end a process, until its time is over.

Each case is a process.
"""

import signal

from tests.run.supervision.test_watchdog import run

REQUEST = """
from megatron_rl.run.supervision.stop_request import StopRequest

def asked(seconds, work):
    stop = StopRequest(seconds)
    stop.accept()
    words = ExitReporter(LocalRanks(), patience_seconds=0.3)
    with Watchdog(words, end_seconds=2.0, stop=stop) as watch:
        try:
            with watch.interruptible():
                work(stop)
        except BaseException as error:
            report_exception(error, words, watch)
        exit_process(words, LocalRanks(), None)

def saving(stop):
    print("ready", flush=True)
    while stop.asked is None:
        time.sleep(0.05)
    time.sleep(1.0)
    words = f"saved after {stop.asked}"
    print(words, file=sys.stderr, flush=True)
    os._exit(75)
"""


def test_the_run_has_time_to_save() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        code, errors, _ = run(REQUEST + "asked(9.0, saving)", number, number)
        assert code == 75 and f"saved after {number.name}" in errors


def test_a_run_that_takes_too_long_ends_as_it_stands() -> None:
    for work in ("sleeping", "stuck"):
        code, errors, seconds = run(REQUEST + f"asked(1.0, lambda stop: {work}())", signal.SIGTERM)
        assert code == 143 and "told to stop (SIGTERM)" in errors and 1.0 < seconds < 8


def test_an_interrupt_by_hand_waits_for_nothing() -> None:
    code, errors, seconds = run(
        REQUEST + "asked(30.0, lambda stop: sleeping())", signal.SIGTERM, signal.SIGINT
    )
    assert code == 130 and "told to stop (SIGINT)" in errors and seconds < 8
