"""The command `pdflow bench`: finds the server, sends the workload, reports the results. Exit code 0 if any request was
answered, 1 if none was; 130 if it was interrupted, which keeps the results so far."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio
from rich.console import Console

from pdflow.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_NOT_SO, PdflowError
from pdflow.results.files.write import make_folder
from pdflow.workload.sessions import sessions
from pdflow_runtime.bench.asked import BenchOptions
from pdflow_runtime.bench.contents import Contents
from pdflow_runtime.bench.form import RequestForm
from pdflow_runtime.bench.ledger import Ledger
from pdflow_runtime.bench.load import ConcurrencyLimit, Load, Requests
from pdflow_runtime.bench.plan import BenchPlan, plan_of
from pdflow_runtime.bench.progress import BenchProgress
from pdflow_runtime.bench.report import BenchRun
from pdflow_runtime.bench.run_clock import RunClock
from pdflow_runtime.bench.sender import RequestTarget, Sender
from pdflow_runtime.bench.talk import Talk
from pdflow_runtime.bench.target import model_of, server_of
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.process.processes import leaves
from pdflow_runtime.tls_socket import client_context

IDLE_CONNECTIONS = 4_096
"""Kept for the next requests."""


def bench(command: Sequence[str] = (), **options: Any) -> int:
    """Run the command: send, print the report, write the files; return the exit code. Options are those of
    BenchOptions.

    Raises PdflowError for bad input, and where nobody answers.
    """
    asked = BenchOptions(**options)
    _ = asked.quoted, asked.slo, asked.extra, asked.labels  # what is wrong with them is said before anything is sent
    plan, server = plan_of(asked), server_of(asked)
    for folder in (asked.out, (asked.result_dir or ".") if asked.save_result else None):
        if folder is not None:
            make_folder(Path(folder))
    allow_many_connections()
    try:
        run = trio.run(measured, asked, plan, server, command)
    except BaseExceptionGroup as group:
        found = [error for error in leaves(group) if isinstance(error, PdflowError)]
        if len(found) != len(list(leaves(group))):
            raise
        raise found[0] from None
    written = run.save(asked)
    if not asked.quiet:
        Stdout(highlight=False).print(run.table())
        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        for path in written:
            console.print(f"written: {path}", style="dim", soft_wrap=True)
    if run.header.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_DONE if run.metrics.completed or not run.metrics.requests else EXIT_NOT_SO


async def measured(
    asked: BenchOptions, plan: BenchPlan, server: RequestTarget, command: Sequence[str] = ()
) -> BenchRun:
    """Run the benchmark up to its figures. NoServerError if no server answers, TraceError for a trace that is
    invalid."""
    client = HttpClient(connect_s=60.0, idle_per_host=IDLE_CONNECTIONS, tls=client_context() if server.tls else None)
    ledger = Ledger(RunClock(), keep_texts=asked.save_detailed)
    try:
        model = await model_of(client, server, asked)
        form = RequestForm(
            path=server.path,
            model=model,
            ignore_eos=plan.ignore_eos,
            return_token_ids=plan.return_token_ids,
            sampling=asked.sampling,
            extra=asked.extra,
        )
        sender = Sender(client, server, ledger, plan.workload.client)
        await warm_up(sender, form, plan, asked.num_warmups)
        load = load_of(plan, sender, form, asked.max_concurrency)
        load.prepare()
        interrupted = await _until_ended_or_interrupted(load, ledger, plan, asked.quiet)
    finally:
        client.close()
    return BenchRun.of(asked, plan, model, ledger, command, interrupted)


def load_of(plan: BenchPlan, sender: Sender, form: RequestForm, max_concurrency: int | None) -> Load:
    """Return what the run sends: the sessions of the workload, or its single requests."""
    contents, limit = Contents(plan.seed, plan.block_tokens), ConcurrencyLimit(sender, max_concurrency)
    workload = plan.workload
    if workload.sessions is None:
        return Requests(limit, plan.requests(), plan.texts(), contents, form)
    assert workload.requests is not None, "sessions are endless"
    system_prompt_tokens = workload.sessions.system_prompt_tokens
    return Talk(limit, sessions(workload, plan.seed), workload.requests, system_prompt_tokens, contents, form)


async def warm_up(sender: Sender, form: RequestForm, plan: BenchPlan, times: int) -> None:
    """Send requests that are not counted, one after the other, each like the first of the run but for its content.
    BrokenAnswerError or UpstreamError if one is not answered."""
    if not times:
        return
    workload = plan.workload
    first = next(iter(sessions(workload, plan.seed))).turns[0] if workload.sessions else next(iter(plan.requests()))
    contents = Contents(plan.seed, plan.block_tokens)
    for number in range(times):
        body = form.body(contents.made(f"warm-up/{number}", first.input_tokens), first.output_tokens)
        await sender.ask(body, lambda _: None)


async def _until_ended_or_interrupted(load: Load, ledger: Ledger, plan: BenchPlan, quiet: bool) -> bool:
    """Run the load; True if SIGINT or SIGTERM interrupted it, which ends it at once, with requests still under way."""
    interrupted = False
    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:

            async def stop_on_signal(scope: trio.CancelScope) -> None:
                nonlocal interrupted
                async for _ in signals:
                    interrupted = True
                    scope.cancel()

            sending = trio.CancelScope()
            nursery.start_soon(stop_on_signal, sending)
            if not quiet:
                console = Console(stderr=True, highlight=False, markup=False, emoji=False)
                nursery.start_soon(BenchProgress(ledger, plan.name, plan.workload.requests).show, console)
            with sending:
                ledger.clock.begin()
                await load.run()
            nursery.cancel_scope.cancel()
    return interrupted


class Stdout(Console):
    """The report's console, to which a reader that closes the pipe is no error."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush, at the interpreter's end


def allow_many_connections() -> None:
    """Raise the limit of file descriptors to the most that this process may have: each open request takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
