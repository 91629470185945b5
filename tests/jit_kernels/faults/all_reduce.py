"""Faults planted in the all-reduces; see test_faults.py. Most need ranks in separate streams."""

from functools import partial

from all_reduce_worlds import absent, chained_calls, rounds, special_calls

_GROUP, _SLOTS = "all_reduce/group.cuh", "all_reduce/slots.cuh"
_AREAS, _SUM = "all_reduce/areas.cuh", "all_reduce/sum.cuh"
_NEEDS = {"scalar_t": "kiln::bf16", "max_world": "4"}
_FUSED = "fused_all_reduce_add_rms_norm"
_ONCE = ("weight_offset, once != 0,", "weight_offset, weight_offset != 0.0f,")
_SPECIAL = partial(rounds, make=special_calls)
_EARLY = partial(rounds, make=chained_calls, overlaps=True)


def _plant(kernel, name, old, new, header="", scenario=rounds, sizes=None):
    """A fault; ``scenario`` None: the generic checks must catch it, at ``sizes``."""
    seeds = 50 if scenario else 1
    return {
        "kernel": kernel, "name": name, "old": old, "new": new, "header": header, "needs": _NEEDS,
        "scenario": scenario, "seeds": seeds, "sizes": sizes,
    }  # fmt: skip


def _of(kernels, header, faults, scenario=rounds):
    """The same faults of a header in several kernels; each is an old and a new text by name."""
    return [
        _plant(kernel, name, *texts, header, scenario)
        for name, texts in faults.items()
        for kernel in kernels
    ]


_COUNTER = ("store_relaxed(counter, epoch + 1)", "store_relaxed(counter, epoch)")
_PHASE = ("int64_t(call.epoch % 2)", "int64_t(call.epoch % 1)")
_REARM = "store_words_relaxed<Scope::sys>(place(i, first, step, from), unsent)"
_WHOLE = {"fewer": 0, "alone": 0}

_PUSHING = (
    _of(
        ["one_shot_push", "two_shot_push", _FUSED],
        _SLOTS,
        {
            "one phase only": _PHASE,
            "slots that are not freed": (_REARM, "(void)unsent"),
        },
    )
    + _of(
        ["one_shot_push"],
        _SLOTS,
        {
            "slots freed by a weak store": (
                _REARM,
                "store_words(place(i, first, step, from), unsent)",
            ),
            "slots freed at gpu scope": (_REARM, _REARM.replace("<Scope::sys>", "")),
            "sent by a weak store": (
                "store_words_relaxed<Scope::sys>(outbox",
                "store_words(outbox",
            ),
            "sent at gpu scope": (
                "store_words_relaxed<Scope::sys>(outbox",
                "store_words_relaxed(outbox",
            ),
            "received at gpu scope": (
                "load_words_relaxed<Scope::sys>(v[i]",
                "load_words_relaxed(v[i]",
            ),
            "one slot for all senders": (
                "+ group.rank * slot_bytes",
                "+ 0 * slot_bytes",
            ),
            "any rank's data is enough": ("if (!missing) break;", "if (missing != wanted) break;"),
        },
    )
    + _of(
        ["one_shot_push"],
        _SLOTS,
        {
            "only the first vector of a batch is freed": (
                "      if (wanted >> i & 1) store_words_relaxed",
                "      if (i < kMost && (wanted >> i & 1)) store_words_relaxed",
            ),
        },
        partial(rounds, size=9000, count=4, group={"blocks": 1}),
    )
)

_PULLING = _of(
    ["one_shot_pull", "two_shot"],
    _AREAS,
    {
        "one area only": _PHASE,
        "a flag told by a relaxed store": (
            "store_release<Scope::sys>(tells",
            "store_relaxed<Scope::sys>(tells",
        ),
        "a flag read by a relaxed load": ("load_acquire<Scope::sys>", "load_relaxed<Scope::sys>"),
        "dropped barrier before the flags": (
            "    __syncthreads();  // all threads of the block have written\n",
            "",
        ),
        "dropped barrier after the flags": ("return !__syncthreads_or(late);", "return !late;"),
    },
) + _of(
    ["two_shot"],
    _AREAS,
    {
        "a flag told at gpu scope": ("store_release<Scope::sys>(tells", "store_release(tells"),
        "a flag read at gpu scope": ("load_acquire<Scope::sys>", "load_acquire"),
        "both barriers with one number": ("2 * call.epoch + number", "2 * call.epoch + 1"),
        "barriers of the call before": ("2 * call.epoch + number", "2 * call.epoch + number - 2"),
        "the last rank left out": ("peer >= group.world ||", "peer >= group.world - 1 ||"),
        "a wait for exactly one number": (
            "int(load_acquire<Scope::sys>(waits_for) - goal) < 0",
            "load_acquire<Scope::sys>(waits_for) != goal",
        ),
        "numbers compared as if they did not wrap": (
            "int(load_acquire<Scope::sys>(waits_for) - goal) < 0",
            "load_acquire<Scope::sys>(waits_for) < goal",
        ),
    },
)

_PULLING += _of(
    ["one_shot_pull", "two_shot"],
    _AREAS,
    {"flags of another block": ("128 * blockIdx.x", "0 * blockIdx.x")},
    partial(rounds, size=1500),
)
_COUNTING = [
    *_of(["one_shot_push", "two_shot"], _GROUP, {"a counter that stands still": _COUNTER}),
    *_of(
        ["one_shot_push", "two_shot_push"],
        _GROUP,
        {
            "a counter advanced before all have read it": (
                "    __syncthreads();  // all have read the counter\n",
                "",
            )
        },
    ),
    *_of(
        ["one_shot_push", "one_shot_pull"],
        _GROUP,
        {
            "a counter for all blocks": (
                "kCounters + 8 * blockIdx.x) + int(kind)",
                "kCounters) + int(kind)",
            )
        },
    ),
]

_WATCHDOG = (
    _of(
        ["one_shot_push", "two_shot"],
        _GROUP,
        {
            "no limit on waiting": ("if (++polls % kPollsPerClock) return false;", "return false;"),
            "a wait after a late call": (
                "load_relaxed<Scope::sys>(group.own_word(0)) == 0)",
                "true)",
            ),
        },
        absent,
    )
    + _of(
        ["two_shot_push"],
        _GROUP,
        {
            "the record names the rank that waits": (
                "write(2, uint32_t(watchdog.missing))",
                "write(2, uint32_t(group.rank))",
            ),
            "the record names the call before": ("write(6, calls + 1)", "write(6, calls)"),
            "the other ranks are not told": ("rank < group.world; ++rank)", "rank < 1; ++rank)"),
        },
        absent,
    )
    + _of(
        ["one_shot_pull"],
        _GROUP,
        {"no patience": ("if (now < since || now", "if (now + 1 < since || now != now && now")},
    )
)

_SUMMING = [
    _plant(
        "one_shot_push",
        "the last rank left out of the sum",
        "rank < kMost; ++rank)\n    if (has_rank",
        "rank < kMost - 1; ++rank)\n    if (has_rank",
        _SUM,
        None,
    ),
    _plant(
        "two_shot",
        "rounded after each rank",
        "sum[i][k] = add_rn(sum[i][k], y[k])",
        "sum[i][k] = round_to<T>(add_rn(sum[i][k], y[k]))",
        _SUM,
    ),
    _plant(
        "one_shot_pull", "a rank more than there is", "place < world;", "place < world + 1;", _SUM
    ),
    _plant(
        "one_shot_push",
        "elements past the message",
        "tail && vector == size - 1 ? tail : kSize",
        "kSize",
        _SUM,
        None,
    ),
    _plant(
        "two_shot_push",
        "vectors that are not aligned",
        "return aligned && count == kSize ?",
        "return count == kSize ?",
        _SUM,
        None,
    ),
    _plant(
        "two_shot",
        "elements in reverse",
        "    v.word[0] |= Word<T>::bits(p[count]);",
        "    v.word[0] |= Word<T>::bits(p[0]);",
        _SUM,
        None,
    ),
    _plant(
        "one_shot_push",
        "the same element stored again",
        "    p[k] = Word<T>::first(v.word[0]);\n    move_down(v);",
        "    p[k] = Word<T>::first(v.word[0]);",
        _SUM,
        None,
    ),
    _plant(
        "one_shot_push",
        "words that look unsent are sent",
        "kiln::sendable(own.load(i))",
        "own.load(i)",
        "",
        _SPECIAL,
    ),
    _plant(
        "two_shot_push",
        "words that look unsent are sent to owners",
        "kiln::sendable(own.load(owner * shard + i))",
        "own.load(owner * shard + i)",
        "",
        _SPECIAL,
    ),
    _plant(
        _FUSED,
        "words that look unsent are sent",
        "kiln::sendable(own.load(i))",
        "own.load(i)",
        "",
        _SPECIAL,
    ),
    _plant("one_shot_push", "the last word is not waited for", " && w[3] != kUnsent", "", _SUM),
]

_TEMPLATES = [
    *[
        _plant(
            kernel,
            "no wait for the kernel ahead",
            "  kiln::pdl_wait_then_trigger();",
            "  kiln::pdl_launch_dependents_last();",
            "",
            _EARLY,
        )
        for kernel in ("one_shot_push", "two_shot_push", "one_shot_pull", "two_shot", _FUSED)
    ],
    _plant(
        "two_shot_push",
        "sums taken from the inputs' half",
        "slots.receive(v, wanted, shard + i, step)",
        "slots.receive(v, wanted, i, step)",
    ),
    _plant("two_shot_push", "sums sent to the inputs' half", "shard + at, sum)", "at, sum)"),
    _plant(
        "one_shot_pull",
        "dropped wait for the inputs",
        "begin < count && areas.barrier(1)",
        "begin < count",
    ),
    _plant(
        "two_shot",
        "dropped wait for the inputs",
        "begin < shard && areas.barrier(1)",
        "begin < shard",
    ),
    _plant("two_shot", "dropped wait for the sums", "if (areas.barrier(2))", "if (begin >= 0)"),
    _plant("two_shot", "the own part read from the area", "rank == group.rank\n", "rank < 0\n"),
    _plant(
        _FUSED,
        "each row in the first row's place",
        "const Chunk sum = slots.receive_sum(place, row * width + i);",
        "const Chunk sum = slots.receive_sum(place, i);",
    ),
    _plant(_FUSED, "two roundings of a product with an offset of 0", *_ONCE),
    _plant(
        _FUSED,
        "dropped barrier between rows",
        "    __syncthreads();  // `partial` has been read\n",
        "",
        "",
        None,
        [{"rows": 4, "d": 1100, "blocks": 1, **_WHOLE}],
    ),
    _plant(
        _FUSED,
        "the norm of the sum without the residual",
        "const Source source{held ? reinterpret_cast<const T*>(sums) : out,",
        "const Source source{out,",
        "",
        None,
    ),
]

FAULTS = [*_PUSHING, *_PULLING, *_COUNTING, *_WATCHDOG, *_SUMMING, *_TEMPLATES]
