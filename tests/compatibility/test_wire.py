"""Versions of the messages between a cluster's processes: which talk to each other, and what the last release says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

from holdfast import tls
from holdfast.errors import IncompatibleVersion
from holdfast.v1 import worker_pb2, worker_pb2_grpc
from holdfast.wire import WIRE_VERSION, agent_option, error_from_rpc
from router.fleet.link import WorkerLink
from tests.compatibility.keep_release import WIRE, descriptors
from tests.harness import Harness, running
from tests.waiting import until

LINKED_S = 20.0


@pytest.fixture
async def cluster(tmp_path: Path) -> Any:
    async with running(tmp_path, num_workers=1) as cluster:
        yield cluster


# ---- versions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [WIRE_VERSION - 1, WIRE_VERSION, WIRE_VERSION + 1])
async def test_neighbouring_versions_talk(cluster: Harness, version: int) -> None:
    address = cluster.addresses["w0"].address
    async with grpc.aio.insecure_channel(address, options=[agent_option(version)]) as channel:
        stats = await worker_pb2_grpc.WorkerServiceStub(channel).Stats(worker_pb2.StatsRequest())
    assert stats.ranks


@pytest.mark.parametrize("version", [WIRE_VERSION + 2, WIRE_VERSION + 40])
async def test_others_are_refused_in_a_sentence(cluster: Harness, version: int) -> None:
    address = cluster.addresses["w0"].address
    async with grpc.aio.insecure_channel(address, options=[agent_option(version)]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await worker_pb2_grpc.WorkerServiceStub(channel).Stats(worker_pb2.StatsRequest())
    error = error_from_rpc(refused.value)
    assert isinstance(error, IncompatibleVersion)
    assert f"messages is {version}, this process's {WIRE_VERSION}" in error.message


async def test_a_router_says_once_why_it_does_not_use_a_worker(
    cluster: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "agent_option", lambda: agent_option(WIRE_VERSION + 2))
    with caplog.at_level(logging.ERROR, "holdfast.router"):
        link = WorkerLink(cluster.addresses["w0"], 3.0)
        try:
            await until(lambda: caplog.messages, LINKED_S, "the refusal")
            assert not link.alive
            await asyncio.sleep(0.5)  # several more attempts
        finally:
            await link.close()
    (message,) = caplog.messages
    assert message.startswith("worker w0@1 cannot be used: the caller's version of the cluster's messages is")


# ---- the last release's messages --------------------------------------------------------------------


def messages_of(file: FileDescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
    def inside(prefix: str, message: DescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
        name = f"{prefix}.{message.name}"
        yield name, message
        for nested in message.nested_type:
            yield from inside(name, nested)

    for message in file.message_type:
        yield from inside(file.package, message)


def misunderstandings(before: FileDescriptorSet, now: FileDescriptorSet) -> list[str]:
    """What of the messages and services of before is missing now, or means something else."""
    found = []
    today = {name: message for file in now.file for name, message in messages_of(file)}
    for name, message in (item for file in before.file for item in messages_of(file)):
        if name not in today:
            found.append(f"{name} is gone")
            continue
        fields = {field.number: field for field in today[name].field}
        reserved = {number for part in today[name].reserved_range for number in range(part.start, part.end)}
        for field in message.field:
            meant = fields.get(field.number)
            if meant is None and field.number not in reserved:
                found.append(f"{name}.{field.name} is gone, and its number {field.number} is not reserved")
            elif meant is not None and not _is_same(field, meant):
                found.append(f"{name}.{field.name} is {meant.name} now, of another type")
        enums = {enum.name: {value.number for value in enum.value} for enum in today[name].enum_type}
        for enum in message.enum_type:
            if missing := {value.number for value in enum.value} - enums.get(enum.name, set()):
                found.append(f"{name}.{enum.name} lacks {missing}")
    methods = {(s.name, m.name): _shape(m) for file in now.file for s in file.service for m in s.method}
    for file in before.file:
        for service in file.service:
            for method in service.method:
                if methods.get((service.name, method.name)) != _shape(method):
                    found.append(f"{service.name}.{method.name} is gone, or takes something else")
    return found


def _is_same(a: Any, b: Any) -> bool:
    return (a.type, a.label, a.type_name) == (b.type, b.label, b.type_name)


def _shape(method: Any) -> tuple[Any, ...]:
    return method.input_type, method.output_type, method.client_streaming, method.server_streaming


def last_release() -> FileDescriptorSet:
    return FileDescriptorSet.FromString(WIRE.read_bytes())


def test_nothing_means_something_else_than_in_the_last_release() -> None:
    assert misunderstandings(last_release(), descriptors()) == []


def test_what_would_be_misunderstood_is_found() -> None:
    """Removed, renumbered and retyped fields, values and methods: each once."""
    now = descriptors()
    messages = {name: message for file in now.file for name, message in messages_of(file)}
    submit, welcome = messages["holdfast.v1.Submit"], messages["holdfast.v1.Welcome"]
    (epoch,) = [field for field in submit.field if field.name == "epoch"]
    submit.field.remove(epoch)
    welcome.field[0].type = welcome.field[0].TYPE_BYTES
    service = next(s for file in now.file for s in file.service if s.name == "RankService")
    del service.method[0]
    assert len(misunderstandings(last_release(), now)) == 3
    reserved = submit.reserved_range.add()
    reserved.start, reserved.end = epoch.number, epoch.number + 1
    assert len(misunderstandings(last_release(), now)) == 2


async def test_a_router_of_the_last_release_runs_a_turn_here(cluster: Harness) -> None:
    """With that release's messages, which this test builds from their descriptions."""
    pool = descriptor_pool.DescriptorPool()
    for file in last_release().file:
        pool.Add(file)
    sent, received, sampling = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"holdfast.v1.{name}"))
        for name in ("RouterMessage", "WorkerMessage", "Sampling")
    )
    tokens = [10, 11, 12]
    message = sent()
    message.submit.MergeFrom(
        type(message.submit)(
            turn_id="t", session_id="s", epoch=1, tokens=b"".join(each.to_bytes(4, "little") for each in tokens),
            prompt_len=len(tokens), sampling=sampling(max_tokens=8, ignore_eos=True),
        )
    )  # fmt: skip
    outputs, finish = list[int](), ""
    async with grpc.aio.insecure_channel(cluster.addresses["w0"].address) as channel:
        attach = channel.stream_stream(
            "/holdfast.v1.WorkerService/Attach",
            request_serializer=sent.SerializeToString,
            response_deserializer=received.FromString,
        )
        call = attach()
        await call.write(message)
        async with asyncio.timeout(LINKED_S):
            while not finish:
                answer = await call.read()
                for update in answer.step.updates:
                    outputs += update.tokens
                    finish = update.finish_reason
        call.cancel()
    assert finish == "length" and len(outputs) == 8
