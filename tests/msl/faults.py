"""Faults to seed into the Metal text, as data. Each replaces `old`, which occurs once, by `new`; the suite must object.

`kernel` is the file whose launches are changed (`attention` is the header of all decode kernels); `check` names the
trial in `test_faults` that has to notice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    name: str
    kernel: str
    old: str
    new: str
    check: str = "decode"


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

FAULTS = [
    # Barriers
    Fault("the barrier before the SIMD groups' results are merged is missing", "decode", BARRIER, ""),
    Fault(
        "the barrier before the staged keys are read is missing",
        "decode_wide",
        f"    {BARRIER}\n    for (int step",
        "    for (int step",
        "wide",
    ),
    Fault(
        "the barrier before the staged keys are replaced is missing",
        "decode_wide",
        f"    }}\n    {BARRIER}\n  }}",
        "    }\n  }",
        "wide",
    ),
    Fault(
        "a barrier that does not order threadgroup memory",
        "decode",
        BARRIER,
        "threadgroup_barrier(mem_flags::mem_device);",
    ),
    Fault(
        "a barrier that idle SIMD groups skip",
        "decode",
        BARRIER,
        f"if (span.first + simdgroup < span.last) {{ {BARRIER} }}",
    ),
    # SIMD collectives
    Fault(
        "a fold step shuffles half as far",
        "attention",
        "simd_shuffle_xor(upper ? near : far, DISTANCE)",
        "simd_shuffle_xor(upper ? near : far, DISTANCE / 2)",
    ),
    Fault(
        "a fold step keeps the half that it should give",
        "attention",
        "(upper ? far : near) + ",
        "(upper ? near : far) + ",
    ),
    Fault(
        "the last fold steps are skipped",
        "attention",
        "values[0] += simd_shuffle_xor(values[0], DISTANCE);",
        "",
    ),
    Fault(
        "the highest score is sought among the wrong lanes",
        "attention",
        "max(highest, simd_shuffle_xor(highest, ushort(j * LANES / SCORES)))",
        "max(highest, simd_shuffle_xor(highest, ushort(1)))",
        "wide",
    ),
    Fault(
        "teams of a SIMD group are merged from too far on",
        "attention",
        "float4 total = value[head][part] * shrink;\n        UNROLL\n        for (int distance = LANES;",
        "float4 total = value[head][part] * shrink;\n        UNROLL\n        for (int distance = 2 * LANES;",
    ),
    Fault(
        "a weight comes from another score's lane",
        "attention",
        "simd_shuffle(weight[score % HELD], ushort(base + score * LANES / SCORES))",
        "simd_shuffle(weight[score % HELD], ushort((base + score * LANES / SCORES + 2) % 32))",
    ),
    Fault(
        "a shuffle leaves the SIMD group",
        "attention",
        "ushort(base + score * LANES / SCORES));\n  }",
        "ushort(base + 32 + score * LANES / SCORES));\n  }",
    ),
    Fault(
        "only one lane takes part in a shuffle",
        "decode",
        "  const float sum = team.of_head(team.sum, head);",
        "  const float sum = lane == 0 ? team.of_head(team.sum, head) : 0.0f;",
    ),
    # Blocks and tables
    Fault("the next block's id is one too high", "decode", "ulong(next) *", "ulong(next + 1) *"),
    Fault(
        "the block index is off by one",
        "decode",
        "const int first = index * BLOCK + offset;",
        "const int first = (index + 1) * BLOCK + offset;",
    ),
    Fault(
        "the table is read past the row's blocks",
        "decode",
        "next = index + SIMDGROUPS < span.last ? table[index + SIMDGROUPS] : 0;",
        "next = table[index + SIMDGROUPS];",
    ),
    Fault(
        "the table is read past its end",
        "decode",
        "index + SIMDGROUPS < span.last ? table[index + SIMDGROUPS] : 0;",
        "index + SIMDGROUPS < span.last + 3 ? table[index + SIMDGROUPS] : 0;",
    ),
    Fault("a row reads its neighbour's table", "decode", "tables + row * tables_shape[1]", "tables"),
    Fault("the span is not cut at the last block", "attention", "min(span.first + share, end)", "span.first + share"),
    Fault("a share of blocks is rounded down", "attention", "(blocks + splits - 1) / splits", "blocks / splits"),
    Fault("the last, partly filled block is left out", "attention", "(high + block - 1) / block", "high / block"),
    Fault(
        "K and V rows lie as if there were one KV head",
        "decode",
        "constexpr int STRIDE = KV_HEADS * CHUNKS;",
        "constexpr int STRIDE = CHUNKS;",
    ),
    Fault("every KV head reads the first one's values", "decode", "v_pool + kv_head * CHUNKS", "v_pool"),
    # Tails and masks
    Fault(
        "the tail of the last block is loaded",
        "attention",
        "const bool visible = first + place >= low && first + place < high;",
        "const bool visible = first + place >= low;",
    ),
    Fault(
        "keys before the window are loaded",
        "attention",
        "const bool visible = first + place >= low && first + place < high;",
        "const bool visible = first + place < high;",
        "window",
    ),
    Fault(
        "a step counts as whole that the end cuts",
        "attention",
        "first >= low && first + TEAMS * KEYS <= high",
        "first >= low",
    ),
    Fault(
        "what is not visible gets a weight",
        "attention",
        "weight[held] = position >= low && position < high ? score : LOWEST;",
        "weight[held] = score;",
    ),
    Fault("the window is one too wide", "decode", "high - int(params[2])", "high - int(params[2]) - 1", "window"),
    Fault("the window is one too narrow", "decode", "high - int(params[2])", "high - int(params[2]) + 1", "window"),
    Fault(
        "staged keys past the end are loaded",
        "decode_wide",
        "first + key >= low && first + key < high",
        "first + key >= low",
        "wide",
    ),
    Fault(
        "idle lanes load past a key's end",
        "attention",
        "CHUNKS % LANES == 0 || int(lane) + part * LANES < CHUNKS",
        "true",
        "uneven",
    ),
    # The softmax
    Fault(
        "the sum is not scaled down with the top",
        "attention",
        "      sum[i] *= decay[i];\n      UNROLL\n      for (int j",
        "      UNROLL\n      for (int j",
    ),
    Fault("the values are not scaled down with the top", "attention", "value[head][part] *= shrink;", ""),
    Fault("the cap is left out", "attention", "cap * LOG2E * precise::tanh", "LOG2E * precise::tanh", "softcap"),
    Fault(
        "the sink's weight is left out",
        "attention",
        "(sink == LOWEST ? 0.0f : fast::exp2(sink - highest))",
        "0.0f",
        "sinks",
    ),
    Fault(
        "an empty row is divided by its sum", "attention", "(total > 0.0f ? decay / total : 0.0f)", "(decay / total)"
    ),
    Fault("a sum of weights is lost between SIMD groups", "decode", "sum += decay * sums_of", "sum += sums_of"),
    # Threads and outputs
    Fault("all teams write the SIMD group's result", "decode", "if (team.base == 0) {", "if (true) {"),
    Fault(
        "the output's last vectors are left unwritten",
        "decode",
        "item < GROUP * CHUNKS; item",
        "item < GROUP * CHUNKS - 1; item",
        "whole",
    ),
    Fault(
        "the second head of a KV head overwrites the first", "decode", "first_head + head, split", "first_head, split"
    ),
    Fault(
        "a wide tile's absent heads are written",
        "decode_wide",
        "if (head < heads && team.base == 0",
        "if (team.base == 0",
        "wide",
    ),
    # The merge of the splits
    Fault(
        "splits that do not exist are merged",
        "merge",
        "const int used = (blocks + share - 1) / share;",
        "const int used = splits;",
    ),
    Fault(
        "the last split is left out",
        "merge",
        "const int used = (blocks + share - 1) / share;",
        "const int used = blocks / share;",
    ),
    Fault("a split is read at another one's place", "merge", "(base + i) * (CHUNKS + 1)", "(base + i) * CHUNKS"),
    Fault("splits are added unweighted", "merge", "+= weight * parts", "+= parts"),
    Fault("a split gets another one's weight", "merge", "ushort(i)", "ushort(i ^ 1)"),
    Fault("the sums of the splits stay apart", "merge", "sum = simd_sum(sum);", ""),
    Fault("the highest score is one lane's own", "merge", "top = simd_max(top);", ""),
    Fault(
        "a lane without a split stays away from the shuffle",
        "merge",
        "const int count = min(used - base, 32);",
        "const int count = base + lane < used ? min(used - base, 32) : 0;",
    ),
    # Writing
    Fault("an ignored slot is written", "write_kv", "if (slot < 0) {", "if (slot < -1) {", "write"),
    Fault("K goes into the pool of V", "write_kv", "(second ? v_pool : k_pool)", "(second ? k_pool : v_pool)", "write"),
    Fault("V's rows are K's", "write_kv", "(second ? v : k)", "(k)", "write"),
    Fault(
        "a copy takes the rows past its filled count",
        "write_kv",
        "if (offset >= copies[3 * copy + 2]) {",
        "if (false) {",
        "write",
    ),
    Fault(
        "a copy leaves out its last row",
        "write_kv",
        "offset >= copies[3 * copy + 2]",
        "offset + 1 >= copies[3 * copy + 2]",
        "write",
    ),
    Fault(
        "a copy's source and destination are exchanged",
        "write_kv",
        "target += (ulong(copies[3 * copy + 1])",
        "target += (ulong(copies[3 * copy])",
        "write",
    ),
    Fault("a copy reads past the list", "write_kv", "(item - rows) / BLOCK;", "(item - rows) / BLOCK + 1;", "write"),
    Fault("a row's second half is not written", "write_kv", "i < WIDTH; i", "i < WIDTH / 2; i", "write"),
    Fault("a row is written past its end", "write_kv", "i < WIDTH; i", "i <= WIDTH; i", "write"),
    Fault("nobody writes the order", "write_kv", "if (item == 0 && !second && thread_x < 8)", "if (item < 0)", "write"),
    Fault("both pools' threads write the order", "write_kv", "item == 0 && !second &&", "item == 0 &&", "write"),
    # Rotating and writing
    Fault("the barrier before the angles are read is missing", "rope_and_write", BARRIER, "", "turn"),
    Fault("a barrier that idle threads skip", "rope_and_write", BARRIER, f"if (item < ALL) {{ {BARRIER} }}", "turn"),
    Fault("a thread past the row's end goes on", "rope_and_write", "if (item >= ALL) {", "if (false) {", "turn"),
    Fault(
        "all parts of a row do the first one's work",
        "rope_and_write",
        "int(threadgroup_position_in_grid.y) * THREADS",
        "0",
        "turn",
    ),
    Fault("the last pair has no angle", "rope_and_write", "i < PAIRS; i", "i < PAIRS - 1; i", "turn"),
    Fault("every row stands at the first one's position", "rope_and_write", "positions[row]", "positions[0]", "turn"),
    Fault("the scale is left out", "rope_and_write", "params[0] * float(", "float(", "turn"),
    Fault("all pairs turn by the first ones' angles", "rope_and_write", "pair = 4 * unit;", "pair = 0;", "turn"),
    Fault("a turn the other way", "rope_and_write", "x * cosine - y * sine", "x * cosine + y * sine", "turn"),
    Fault("values are rotated", "rope_and_write", "if (turned && item < ROTATED)", "if (turned)", "turn"),
    Fault(
        "what follows the rotated part is rotated",
        "rope_and_write",
        "if (turned && item < ROTATED)",
        "if (item < ROTATED)",
        "turn",
    ),
    Fault(
        "a partner is half a head away, not half of the rotated part",
        "rope_and_write",
        "!TRADITIONAL ? PAIRS / 4 : 1",
        "!TRADITIONAL ? UNITS : 1",
        "turn",
    ),
    Fault(
        "neighbours are taken for halves",
        "rope_and_write",
        "TRADITIONAL ? float4(one.y, one.w, two.y, two.w) :",
        "",
        "neighbours",
    ),
    Fault(
        "neighbours are not put back side by side",
        "rope_and_write",
        "TRADITIONAL ? float4(a.x, b.x, a.y, b.y) :",
        "",
        "neighbours",
    ),
    Fault(
        "rows lie as if they had no values",
        "rope_and_write",
        "HEADS + 2 * KV_HEADS) + head",
        "HEADS + KV_HEADS) + head",
        "turn",
    ),
    Fault("a row without a slot is written", "rope_and_write", "if (slot < 0) {", "if (slot < -1) {", "turn"),
    Fault("K and V change pools", "rope_and_write", "? k_pool : v_pool", "? v_pool : k_pool", "turn"),
    Fault("V's heads lie behind K's in one pool", "rope_and_write", "kv_head % KV_HEADS", "kv_head", "turn"),
    Fault("the far vector is not written", "rope_and_write", "target[far] = two;", "", "turn"),
    Fault("queries of all rows go to the first", "rope_and_write", "ulong(row) * HEADS + head", "head", "turn"),
]
