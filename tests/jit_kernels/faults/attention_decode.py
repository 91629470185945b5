"""Faults planted in the decode attention kernels; see test_faults.py."""

_ONE_HEAD = {"kv_heads": 1, "group": 4, "most": 6, "split": 16}
_TINY = {**_ONE_HEAD, "batch": 0}
_SPLIT = {"batch": 2, "kv_heads": 1, "group": 3, "most": 6, "split": 4}
_TREE = {"batch": 4, "kv_heads": 1, "group": 1, "most": 33, "split": 1}  # two levels of merging
_SPECULATIVE = {"batch": 3, "kv_heads": 1, "group": 8, "most": 33, "split": 2}
_WINDOW = {**_SPECULATIVE, "group": 1, "window": 30}  # a tile's tokens see different first blocks
_CHUNK = {**_WINDOW, "window": -7}  # tokens of a tile see different chunks
_FAR_CHUNK = {**_WINDOW, "window": -110}  # whose border is inside of a block
_ALL_OPTIONS = {**_SPECULATIVE, "window": 20, "cap": 3, "sinks": 1}
_TWO_HEADS = {**_SPLIT, "by_token": 1, "kv_heads": 2}
_LONG = {"requests": 1, "context": 400, "kv_heads": 1, "group": 4, "most": 1, "split": 16}
_REUSED = {**_LONG, "requests": 16, "context": 150}  # more items than blocks
_ALL_HALVES = {**_REUSED, "requests": 10, "context": 500}  # and all of a warp's stages in use
_LATE_NODES = {**_LONG, "context": 1100, "group": 8, "most": 66, "split": 1}
_VERY_LONG = {**_LONG, "context": 2200}  # a warp looks ids up twice
_NARROW = {**_TWO_HEADS, "less": 16}  # columns of the tile past head_dim
_LATE = {**_LONG, "batch": 5, "group": 1, "window": 63}  # no later token sees the first keys
_STEEP = {**_LONG, "steep": 40}  # logits that rise by more than the slack
_UNITS = {**_ONE_HEAD, "batch": 4, "most": 2, "split": 64}  # of 777 keys: a warp has four units
_HALVES = {**_UNITS, "most": 4, "steep": 40}  # or two
_QUARTERS = {**_UNITS, "most": 6, "steep": 40}  # or one
_TWO_ROUNDS = {**_UNITS, "requests": 4, "context": 777, "long": 300, "most": 33}
_TWO_ROUNDS.pop("batch")  # quarters of a split in a block's second item and others' first
_SENT = {**_LONG, "context": 16 * 32, "group": 4, "most": 32, "split": 1}  # of a block each
_SENT_TWICE = {**_SENT, "context": 16 * 33, "most": 33, "few": 33}  # a node's sum, and a part
_FEWER = {**_SENT, "context": 16 * 10}
_NOT_PAIRED = {**_FEWER, "long": 10}  # the last two are of different clusters
_PAIRED = {**_LONG, "context": 1536, "group": 3, "most": 16, "split": 32, "few": 3}  # 12 quarters
_CROWDED = {**_LONG, "requests": 4, "context": 100, "group": 16, "most": 2, "split": 2}
_GROUPS = {**_ONE_HEAD, "batch": 7, "group": 3, "most": 8, "split": 8, "few": 2, "shared": 300}
_FOURS = {**_GROUPS, "group": 2, "few": 4, "shared": 700}
_GROUPS_IN_UNITS = {**_ONE_HEAD, "batch": 6, "most": 2, "split": 32, "shared": 600}
_LONG_PREFIX = {**_LONG, "requests": 3, "context": 2600, "shared": 2500}
_MANY = {**_ONE_HEAD, "requests": 200, "context": 300}  # more than the plan has threads


def _planted(kernel, rows):
    names = ("name", "old", "new", "sizes")
    for row in rows:
        fault = dict(zip(names, row[:4], strict=True)) | (row[4] if len(row) > 4 else {})
        yield {"kernel": kernel, **fault, "sizes": [fault["sizes"]]}


_ATTEND = {"header": "attention_decode/attend.cuh"}
_FETCH = {"header": "attention_decode/fetch.cuh"}
_PARTS = {"header": "attention_decode/parts.cuh"}
_LOGITS = {"header": "kiln/attention/logits.cuh"}
_MERGE = {"header": "attention_decode/merge.cuh"}
_ROWS = {"header": "attention_decode/rows.cuh"}
_CUT = {"header": "kiln/attention/split.cuh"}
_VISIBLE = {"header": "kiln/attention/visible.cuh"}
_SEEDS, _MORE_SEEDS = {"seeds": 3}, {"seeds": 8}
_MANY_BLOCKS = {**_PARTS, "multiprocessors": 17}
_MANY_MORE = {"multiprocessors": 35}
_MORE_BLOCKS = {**_PARTS, "multiprocessors": 18}
_MEMORY = {"header": "kiln/ptx/memory.cuh", "seeds": 3}
_ACQ_REL = "inc, counter, last, cuda_host::acq_rel"
_RELAXED = "inc, counter, last, cuda_host::relaxed"
_HALF = "copy_wait<kHalves - 1>();\n    "
_SHORT = _HALF.replace("kHalves - 1", "kHalves")
_QUERIES = "kiln::copy_wait<kHalves - kAhead>();"
_FP8 = {**_ROWS, "needs": {"scalar_t": "kiln::bf16", "head_tile": "64", "kv_t": "kiln::e4m3"}}
_WIDE = {"needs": {"scalar_t": "kiln::bf16", "head_tile": "256", "kv_t": "SCALAR_T"}}
_KEYS, _VALUES = "__syncwarp();  // the keys are", "__syncwarp();  // the values are"
_FIRST, _NEXT = "__syncwarp();  // the item", "__syncwarp();  // every lane"
_ATTENTION = [
    ("no wait for the keys", _HALF + _KEYS, _KEYS, _LONG, _ATTEND),
    ("wait for the values one group short", _HALF + _VALUES, _SHORT + _VALUES, _LONG, _ATTEND),
    ("no wait for the first item", "kiln::copy_wait<0>();\n  " + _FIRST, _FIRST, _TINY),
    ("no wait for the next item", "copy_wait<0>();\n  " + _NEXT, _NEXT, _TREE, _ATTEND),
    ("no wait for the queries", _QUERIES, "", _TINY),
    ("no wait for the next queries", _QUERIES, "if (now == first) " + _QUERIES, _REUSED),
    ("the place of another item", "if (threadIdx.x == 0) item", "if (!threadIdx.x && !side) item",
     _TWO_ROUNDS),
    ("item used without a warp barrier", _FIRST, "//", _TINY, _SEEDS),
    ("no barrier after the queries", "__syncthreads();  // the q", "//", _SPLIT, _SEEDS),
    ("keys replaced too early", "__syncwarp();  // the keys have", "//", _LONG,
     {**_ATTEND, **_SEEDS}),
    ("values replaced too early", "__syncwarp();  // the values have", "//", _LONG,
     {**_ATTEND, **_SEEDS}),
    ("results over the next item's blocks", "+ kAhead * Shape::kHalf);", ");", _TREE, _SEEDS),
    ("no barrier before the warps are merged", "__syncthreads();  // all", "//",
     _TINY, _SEEDS),
    ("results replaced too early", "__syncthreads();  // the results", "//", _ALL_HALVES,
     _SEEDS),
    ("no warp barrier before an arrival", "__syncwarp();  // the warp's", "//", _LATE_NODES,
     {**_PARTS, **_SEEDS}),
    ("a counter shared by two levels", "node + (1 << level)", "node", _TREE,
     {**_PARTS, **_MORE_SEEDS}),
    ("a counter shared by the warps", "* kWarps + me.warp,", "* kWarps,", _SPECULATIVE,
     {**_PARTS, **_SEEDS}),
    ("the first takes itself for the last", "before) != children - 1", "before) != 0", _SPLIT,
     _PARTS),
    ("arrival without an order", _ACQ_REL, _RELAXED, _SPLIT, _MEMORY),
    ("a message read before it is there", "while (!__all_sync(kWarp, sent));", "while (false);",
     _QUARTERS, {**_MERGE, **_SEEDS}),
    ("a scale not sent", "lane < kScaleRoom / 4) store", "lane > 40) store", _QUARTERS, _MERGE),
    ("messages left behind", "reset_message(place);", "", _QUARTERS, _MERGE),
    ("scales left behind", "reset_message(scale + i);", ";", _QUARTERS, _MERGE),
    ("messages for a block that comes before", "mailed ? part < end - int(before)",
     "mailed ? part > 0", _QUARTERS, _PARTS),
    ("a pair of two clusters", "(first_item + end) % 2 == 1", "true", _NOT_PAIRED, _MANY_BLOCKS),
    ("both of a pair at the same rows", "two ? int(blockIdx.y % 2) : 0", "0", _SENT, _MANY_BLOCKS),
    ("rows of a pair left out", "two ? 2 : 1, room", "2, room", _NOT_PAIRED, _MANY_BLOCKS),
    ("who is sent to is not ready", "kiln::cluster_wait();  // the other block can", "// the other",
     _PAIRED, {"multiprocessors": 17, **_SEEDS}),
    ("what lay there taken for sent", "Inbox::clear(queries);", "", _PAIRED,
     {"multiprocessors": 17}),
    ("no wait for the other block's row", "while (!__all_sync(kWarp, sent));", "while (false);",
     _PAIRED, {**_MANY_BLOCKS, **_SEEDS}),
    ("the other block's rows kept", "send_to_peer(others + at, sum);", ";", _PAIRED, _MANY_BLOCKS),
    ("a row left out for want of another", "n / 2 * 2 < num_rows", "n < num_rows", _PAIRED,
     _MANY_BLOCKS),
    ("two clusters' items paired", "(int(blockIdx.y) - item.part()) % 2 == 0", "true",
     {**_PAIRED, "long": 10}, _MANY_BLOCKS),
    ("a node's sum in the place of a part", "sum_step + column", "column", _SENT_TWICE,
     _MORE_BLOCKS),
    ("parts taken for the sums of nodes", "level > 0 ? sum_step : 0", "0", _SENT_TWICE,
     _MORE_BLOCKS),
    ("a last part that no node sends on", "alone ? y.sum_step : 0", "0", _SENT_TWICE, _MORE_BLOCKS),
    ("half of the parts added to themselves", "begin = me.warp / warps * half", "begin = 0", _FEWER,
     _MANY_BLOCKS),
    ("more than a warp's half", "min(all.count, begin + half)", "all.count", _SENT, _MANY_BLOCKS),
    ("second sums read too early", "__syncthreads();  // the second sums are", ";  //", _SENT,
     {**_MANY_BLOCKS, **_SEEDS}),
    ("second sums replaced too early", "__syncthreads();  // the second sums were", ";  //",
     {**_SENT, "group": 2}, {**_MANY_BLOCKS, **_MORE_SEEDS, **_WIDE}),
    ("second sums of another row", "room + own * 128", "room", _SENT, {**_MANY_BLOCKS, **_SEEDS}),
    ("the first eight parts left out", "before = add(before, y), y = eight", "y = eight", _TREE,
     _MERGE),
    ("messages between a block's own items", "num_items <= int(gridDim.y)", "true", _TWO_ROUNDS,
     _SEEDS),
    ("more messages than there is room for", "headers[warp].y <= mail_rows / 2", "true", _CROWDED),
    ("messages between items that share parts", " && !headers[warp].z", "", _GROUPS, _MANY_MORE),
    ("parts as near as those of a single request", "flat_rows + item.other_tokens() * heads.group",
     "flat_rows", _GROUPS, _PARTS),
    ("one counter for all requests of a group", "first_row += num_rows, counter += num_rows;",
     "first_row += num_rows;", _GROUPS, _PARTS),
    ("rows of a group's first request merged again", "parts += num_rows * row_step;", "", _FOURS,
     _PARTS),
    ("the first request of a group merged alone", "left = place.num_requests;", "left = 1;",
     _GROUPS),
    ("results of a group's first request for all", "sum_of_warps(first + row,",
     "sum_of_warps(row,", _FOURS, _PARTS),
    ("rows of a group's first request sent alone", "first < num_requests * num_rows",
     "first < num_rows", _GROUPS, _PARTS),
    ("rows of a group taken for those of a request", "item.is_shared() ? heads.group :", "",
     _FOURS, {**_PARTS, **_SEEDS}),
    ("other requests counted as tokens", "size & 31", "size & 255", _GROUPS_IN_UNITS, _CUT),
    ("sharing taken for a tile", "& 0xfff;", "& 0x1fff;", _GROUPS, _CUT),
    ("keys past the end read", "m * kKVBlock + row < valid", "true", _TINY, _FETCH),
    ("the last pair taken for a whole one", "dense && left >= Shape::kKeys", "dense", _TINY,
     _FETCH),
    ("any pool taken for a dense one", "    dense = ", "    dense = true || ",
     {**_TWO_HEADS, "batch": 4}, _FETCH),
    ("queries of another request read", "row < rows && chunk", "chunk", _TINY, _ATTEND),
    ("block table read past the end", "block >= count * kPair || block * kKVBlock >= num_keys",
     "false", _TINY, _FETCH),
    ("no guard for a row without keys", "> minus_infinity() ? top", "> 0 ? top", _TINY, _LOGITS),
    ("no guard for an empty sum", "x.sum > 0 ? f *", "true ? f *", _TINY, _MERGE),
    ("first ids of the wrong block", "id[m] = i < 2 ? item.ids[me.warp * kPair + m]",
     "id[m] = i < 2 ? item.ids[m]", _SPLIT, _FETCH),
    ("next ids not looked up", "if (i % 2 == 0 && pair % kIds == 0) {", "if (i < 0) {", _VERY_LONG,
     _FETCH),
    ("causal limit off by one", "num_keys - num_tokens + 1;", "num_keys - num_tokens;", _TINY,
     _ATTEND),
    ("last keys taken for seen by all", "> bounds.all_limit)", "> bounds.all_limit + 1)",
     {**_LATE, "window": 0}, _ATTEND),
    ("window off by one", "own < begin[n][j % 2]", "own <= begin[n][j % 2]", _WINDOW, _ATTEND),
    ("first keys taken for seen by all", "s.begin(s.before + heads.token_of(s.last_row))",
     "s.begin(s.before)", _LATE, _ATTEND),
    ("chunks begin at a warp's first key", "first_visible(end + origin, window) - origin",
     "first_visible(end, window)", _FAR_CHUNK, _ATTEND),
    ("chunk of the next token seen", "position = max(0, end - 1)", "position = max(0, end)",
     _CHUNK, _VISIBLE),
    ("chunk taken for a window", "position - int(unsigned(position) % unsigned(-window))",
     "max(0, end + window)", _CHUNK, _VISIBLE),
    ("wrong token of a row", "unsigned(inverse_group)", "unsigned(1 << 18)", _SPECULATIVE,
     _PARTS),
    ("wrong KV head", "x.values + head *", "x.values + 0 *", _TWO_HEADS, _FETCH),
    ("pool taken as laid out by head", "i % 2 ? x.value_token", "i % 2 ? x.head_dim",
     _TWO_HEADS, _FETCH),
    ("rows merged in another tile's place", "y.counter * y.row_step;",
     "item.row_start * y.row_step;", _ALL_OPTIONS, {**_PARTS, **_SEEDS}),
    ("old result not rescaled", "sum[n][j] *= f;", "", _STEEP, _ROWS),
    ("top of another eight", "best[n][j] = over_keys_max(best[n][j])",
     "best[n][j] = over_keys_max(best[0][j])", {**_SPECULATIVE, "steep": 40}, _ROWS),
    ("a unit counted twice", "      rows.clear();\n", "", _UNITS, _ATTEND),
    ("two units counted twice", "        two.clear();\n", "", _UNITS, _ATTEND),
    ("a share ends with its first unit", "end = from.unit_end(item, ++unit);", "end = 0;",
     _UNITS, _ATTEND),
    ("units of a warp as of a whole split", "1 << (warp_bits - halvings_of(kind))",
     "1 << warp_bits", _HALVES, _CUT),
    ("every half taken for the first", "own = part & ((1 << halvings) - 1);", "own = 0;", _HALVES,
     _CUT),
    ("units of halves counted as of quarters", "own << (2 * warp_bits - halvings)",
     "own << warp_bits", _HALVES, _CUT),
    ("a step of the tree without its weight", "= f(y[pass], next", "= f(next.y[pass], next",
     {**_LONG, "steep": 40}, _PARTS),
    ("halves not weighed", "tree.factors[step] = factor;", "", _HALVES, _MERGE),
    ("pairs of quarters not weighed", "if (step >= halvings) continue;", "if (step) continue;",
     _QUARTERS, _MERGE),
    ("a step's factors of another child", "factors[step], first + other)",
     "factors[step], first + k)", _QUARTERS, _MERGE),
    ("sums of quarters left as they were", "own = {top, f(sum,", "own = {top, 0 * f(sum,",
     _QUARTERS, _MERGE),
    ("halves weighed as splits", "if (step == halvings) tree", "if (step == 0) tree", _HALVES,
     _MERGE),
    ("parts not weighed", "weight = MergeFactors::relative_to(whole.top, own.top).added;",
     "weight = 1.0f;", {**_SPLIT, "steep": 40}, _MERGE),
    ("a part's scale counted for each quarter", "lane & ((1 << halvings) - 1) ?", "false ?",
     _QUARTERS, _MERGE),
    ("cap left out", "if (softmax.cap > 0)", "if (softmax.cap > 100)", _ALL_OPTIONS, _ATTEND),
    ("sink of another head", "sinks + h :", "sinks + h % 2 :", _ALL_OPTIONS, _PARTS),
    ("scale of the values left out", "float f = v_scale", "float f = 1.0f", _TINY, _MERGE),
    ("lse in units of log2", "log2_fast(x.sum)) * kLn2", "log2_fast(x.sum))", _TINY, _MERGE),
    ("columns past head_dim read", "own_column < x.head_dim ?", "true ?", _NARROW, _FETCH),
    ("queries past head_dim read", "row < rows && chunk * 8 < head_dim", "row < rows", _NARROW,
     _ATTEND),
    ("columns past head_dim stored", "if (column >= x.head_dim) continue;", "", _NARROW, _PARTS),
    ("columns past head_dim merged", "if (column < x.head_dim) {", "{", _NARROW, _PARTS),
    ("wrong chunk of the values", "(2 * c + lane / 8 % 2)", "(2 * c + 1 - lane / 8 % 2)", _TINY,
     _ROWS),
    ("bytes of fp8 values not sorted", "(four & 0xff0000ff) |", "four |", _TINY,
     {**_FP8, "header": "kiln/ptx/fp8.cuh"}),
    ("scales of queries in one place", "scales[i / kRow] = as_float", "scales[0] = as_float", _TINY,
     {**_FP8, **_ATTEND}),
    ("scales of queries left out", "softmax.scale * buffers.query_scales[row]", "softmax.scale",
     _TINY, {**_FP8, **_ATTEND}),
    ("greatest of half a row of queries", "m < kRow; m *= 2", "m < kRow / 2; m *= 2", _TINY,
     {**_FP8, **_ATTEND}),
    ("queries beyond fp16's range", "(2 * 127 + 14 - exponent)", "(2 * 127 + 19 - exponent)", _TINY,
     {**_FP8, **_ATTEND}),
    ("fp8 queries in 16-bit order", "<Words2>(row + lane % 4 * 4)", "<Words2>(row)", _TINY, _FP8),
]  # fmt: skip
_PLAN = [
    ("no barrier before the sums are read", "= x;\n  __syncthreads();", "= x;", _MANY, _SEEDS),
    ("sums replaced too early", "if (!few) __syncthreads();", "//", _MANY, _SEEDS),
    ("a request of another lane", "of_lane(request % 32)", "of_lane(0)", _TREE),
    ("few requests taken for many", "num_requests <= 32", "true", _MANY),
    ("another's request cut", "if (r == request) own", "if (r == request / 2) own", _MANY),
    ("requests past the first 128 left out", "r < num_requests;", "r < min(num_requests, 128);",
     _MANY),
    ("tile and split swapped", "tile << 16 | part;", "part << 16 | tile;", _SPECULATIVE),
    ("rows of whole requests counted", "x.num_splits > 1)", "true)", _SPECULATIVE),
    ("divided beyond the machine", "count.all_more > max_splits", "count.all_more > 999", _UNITS),
    ("divided items of later requests counted", "if (r >= request || !items) return;", "",
     _QUARTERS),
    ("divided in four where two fit", "--halvings;", "halvings = 0;", _HALVES),
    ("rows of divided requests as of whole ones", "count.divisible_rows << halvings",
     "count.divisible_rows", _TWO_ROUNDS),
    ("twice as many splits", "splits * 2 * longer", "splits * longer", {**_TREE, "few": 2},
     _CUT),
    ("splits that are no power of two", " && splits * 2 <= most", "",
     {**_VERY_LONG, "most": 24, "split": 1, "few": 2}, _CUT),
    ("a split alone in its node divided", "x.num_splits % 8 == 0", "true",
     {**_LONG, "context": 4700, "most": 40, "few": 9}, _CUT),
    ("ids of a quarter's split", "first_unit(kind, part,", "first_unit(kiln::Part::split, part,",
     _QUARTERS),
    ("ids past the end of a split", "block < end ?", "true ?", _SPECULATIVE),
    ("long requests not left to prefill", "num_tokens <= kMostTokens", "true", _SPECULATIVE, _CUT),
    ("window left out", "first_visible(seq_len - num_tokens + 1, window)", "0", _ALL_OPTIONS, _CUT),
    ("chunk of the last token", "seq_len - num_tokens + 1, window)", "seq_len, window)", _CHUNK,
     _CUT),
    ("splits shared under a chunk", "if (window || r %", "if (window > 0 || r %",
     {**_GROUPS, "window": -600}),
    ("splits not shared by the tiles", "rule.most / max(1, x.num_tiles)", "rule.most",
     {**_SPECULATIVE, "split": 1}, _CUT),
    ("a group of two tiles", "r % most_in_group == 0", "r == 0", _GROUPS),
    ("splits shared whose blocks differ", "common < x.begin(x.num_splits - 1)", "common < 1",
     {**_GROUPS, "shared": 100}),
    ("splits shared that end elsewhere", "equal &= begin(split) == x.begin(split)", "equal &= true",
     _GROUPS, _CUT),
    ("units shared with whole splits", " || divisible != x.divisible", "", _GROUPS_IN_UNITS, _CUT),
    ("two tokens in a group", "tokens != 1 || other_tokens", "other_tokens", _GROUPS),
    ("one token grouped with two", "tokens != 1 || other_tokens != 1", "tokens != 1", _GROUPS),
    ("splits shared under a window", "if (window || r %", "if (r %", {**_GROUPS, "window": 600}),
    ("splits shared on an idle machine", "count.all_items > max_splits && ", "",
     {**_GROUPS, "most": 64}),
    ("items of a group's splits left free", "(shares ? count.saved : 0)", "0", _GROUPS),
    ("splits of a group for each request", "own_place > 0 ? parts - 1 : 0", "0", _GROUPS),
    ("rows of a group begin in its midst", "first_row -= own_place * parts * group;", "", _FOURS),
    ("rows of a group's first request for all", "first_row + own_place * group", "first_row",
     _FOURS),
    ("nothing said of shared splits", "first_row, shares, 0}", "first_row, 0, 0}", _GROUPS),
    ("keys of a shared split hidden", "end * kiln::kKVBlock + members", "end * kiln::kKVBlock",
     _FOURS),
    ("long splits as short as the first", "pieces <= few", "true", {**_TREE, "few": 2}, _CUT),
]  # fmt: skip
_SHARED = [
    ("any two ids equal", "own[i] == other[i]", "true", _GROUPS),
    ("the first that differs counted", "__ffs(int(differs)) - 1", "__ffs(int(differs))", _GROUPS),
    ("the first ids compared again", "from + k * 32 + lane", "from + lane",
     _GROUPS_IN_UNITS),
    ("no more than one round", "from < most && !differs", "from < 1", _LONG_PREFIX),
    ("ids past the end compared", "i < most && own", "own", _GROUPS),
    ("the first request compared with none", "if (request > 0) {", "{", _GROUPS),
]  # fmt: skip
FAULTS = [
    *_planted("paged_attention", _ATTENTION),
    *_planted("attention_plan", _PLAN),
    *_planted("shared_blocks", _SHARED),
]
