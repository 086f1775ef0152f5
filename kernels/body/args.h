// What a launch is given: plain records shared by the host and every device. Their field lists also
// yield, through the extension module, the NumPy dtypes that Python fills them in with.
#pragma once

#include "kernels/body/handle.h"

namespace fastkern {

// Scale-up: a rank of the same server. Scale-out: a put.
enum Tier : u32 { kScaleUp, kScaleOut, kNumTiers };

// Rates of the shaped transport, picoseconds per KiB and rank; 0: unlimited.
struct ShapedRates {
    u64 ps_per_kib[kNumTiers];
};

enum RecordState : u32 { kNoRecord, kRecordInWork, kRecordWritten };

// What may be waited for besides items: the end of own puts; that a rank enters the call.
enum OtherWait : u32 { kPutsWait = kNumQueues, kEntryWait };

// The first wait of a rank that ran out of time. `state` is written last, with release.
#define FASTKERN_ERROR_FIELDS(X)                                                  \
    X(u64, expected) /* flag value awaited: epoch << kValueBits | value */        \
    X(u64, seen)     /* flag value found */                                       \
    X(u64, waited_ns)                                                             \
    X(u64, epoch)                                                                 \
    X(u32, queue) /* QueueKind of the item that could not run, or an OtherWait */ \
    X(u32, stage) /* index within its queue */                                    \
    X(u32, chunk)                                                                 \
    X(u32, peer) /* the rank whose flag is missing */                             \
    X(u32, slot) /* the flag */                                                   \
    X(u32, reserved)                                                              \
    X(u64, state) /* RecordState */
FASTKERN_RECORD(ErrorRecord, FASTKERN_ERROR_FIELDS);
static_assert(sizeof(ErrorRecord) == 64, "layout");

using TicketWords = u64[kNumQueues];
using TierWords = u64[kNumTiers];

// The words of one rank's heap that its blocks and its peers share, besides the flags.
#define FASTKERN_CONTROL_FIELDS(X)                                                          \
    X(u64, abort) /* 0, or epoch << kValueBits | origin + 1, written by any rank */         \
    X(u64, epoch) /* calls completed here; advanced by the last block out */                \
    X(TicketWords, tickets)                                                                 \
    X(u64, blocks_out)                                                                      \
    X(TierWords, egress_free_ns) /* shaped transport: when this rank's links fall idle */   \
    X(TierWords, ingress_free_ns)                                                           \
    X(ErrorRecord, record)                                                                  \
    X(u64, notice)           /* networks: an abort word put by a same-index peer */         \
    X(u64, beats)            /* networks: same-index peers add to it while theirs get on */ \
    X(u64, last_beat_ns)     /* networks: when this rank last did, and */                   \
    X(u64, last_beat_claims) /* what its server had claimed then */
FASTKERN_RECORD(Control, FASTKERN_CONTROL_FIELDS);
static_assert(sizeof(Control) == 216, "layout");

// What a block did, for traces: one item from begin to end.
#define FASTKERN_TRACE_FIELDS(X) \
    X(u64, begin_ns)             \
    X(u64, end_ns)               \
    X(u64, bytes)                \
    X(u32, queue)                \
    X(u32, stage)                \
    X(u32, chunk)                \
    X(u32, peer)                 \
    X(u32, block)                \
    X(u32, epoch) /* of the call, its low bits */
FASTKERN_RECORD(TraceEvent, FASTKERN_TRACE_FIELDS);
static_assert(sizeof(TraceEvent) == 48, "layout");

using OutputBytes = u8*;
using InputBytes = const u8*;
using Words = u64*;
using BytesOfRanks = u8* const*;
using WordsOfRanks = u64* const*;
using ControlOfRanks = Control* const*;
using TraceEvents = TraceEvent*;

// One tensor of a dispatch: a row's part from it lies at `offset` in the row that moves.
#define FASTKERN_PART_FIELDS(X)                             \
    X(InputBytes, input)   /* [T, row_bytes] */             \
    X(OutputBytes, output) /* [num_recv_rows, row_bytes] */ \
    X(u64, row_bytes)                                       \
    X(u64, offset) /* a multiple of 16 */
FASTKERN_RECORD(PayloadPart, FASTKERN_PART_FIELDS);
static_assert(sizeof(PayloadPart) == 32, "layout");

constexpr u32 kMostParts = 8;
using PayloadParts = PayloadPart[kMostParts];

// What dispatch and combine need beside the table: first what a dispatch does, then what a combine
// does, whose weights are of the sums' type, float or double.
#define FASTKERN_MOE_ARGS_FIELDS(X)                                                               \
    X(OutputBytes, handle) /* see handle.h */                                                     \
    X(PayloadParts, parts)                                                                        \
    X(InputBytes, weights_input) /* [T, K] */                                                     \
    X(OutputBytes,                                                                                \
      weights_output)      /* expert layout: [num_recv_rows]; rank layout: [num_recv_rows, K] */  \
    X(Words, index_output) /* rank layout: [num_recv_rows, K], int64, -1: not here */             \
    X(u64, weights_offset) /* in the row */                                                       \
    X(u64, header_offset)                                                                         \
    X(u32, num_parts)                                                                             \
    X(u32, weight_bytes)       /* of one; 0: none travel */                                       \
    X(u32, record)             /* 1: fill the handle; 0: it has been filled */                    \
    X(u32, serial)             /* static exchange: of the dispatch, or that it belongs to */      \
    X(InputBytes, expert_out)  /* [num_recv_rows, width] */                                       \
    X(InputBytes, row_weights) /* [num_recv_rows], or null */                                     \
    X(InputBytes, bias)        /* null, or rows `bias_stride` bytes apart (0: one row for all) */ \
    X(OutputBytes, result)     /* [T, width] */                                                   \
    X(u64, width)                                                                                 \
    X(u64, bias_stride)                                                                           \
    X(u32, value_kind) /* of expert_out and result */                                             \
    X(u32, wire_kind)  /* between servers */                                                      \
    X(u32, bias_kind)                                                                             \
    X(u32, result_rows) /* static exchange: T */
FASTKERN_RECORD(MoeArgs, FASTKERN_MOE_ARGS_FIELDS);
static_assert(sizeof(MoeArgs) == 384, "layout");

using MoeArgsOfCall = const MoeArgs*;

#define FASTKERN_KERNEL_ARGS_FIELDS(X)                                                          \
    X(InputBytes, table)        /* this rank's stage table */                                   \
    X(InputBytes, input)        /* [input_rows, row_bytes] */                                   \
    X(OutputBytes, output)      /* [output_rows, row_bytes] */                                  \
    X(ControlOfRanks, controls) /* [R] as mapped here */                                        \
    X(WordsOfRanks, flags)      /* [R] FlagLayout words of each rank */                         \
    X(WordsOfRanks, visible_ns) /* [R] shaped transport: when a flag may be seen; else null */  \
    X(BytesOfRanks, data)       /* [R] DataLayout bytes of each rank */                         \
    X(MoeArgsOfCall, moe)       /* dispatch, combine */                                         \
    X(InputBytes, network)      /* of the transport between servers, or null */                 \
    X(u64, epoch)         /* of this call, from 1; 0: the one after the last that ended here */ \
    X(u64, progress_ns)   /* deadline without progress */                                       \
    X(TraceEvents, trace) /* null: no trace */                                                  \
    X(Words, trace_count) /* events so far; those past the capacity are dropped */              \
    X(u64, trace_capacity)                                                                      \
    X(u32, num_blocks)                                                                          \
    X(u32, rank)
FASTKERN_RECORD(KernelArgs, FASTKERN_KERNEL_ARGS_FIELDS);
static_assert(sizeof(KernelArgs) == 120, "layout");

using ArgsOfRanks = const KernelArgs*;

// What a device kernel is launched with: blocks_per_rank blocks for each rank here, one rank or all
// those of a virtual cluster on one device.
#define FASTKERN_LAUNCH_ARGS_FIELDS(X)      \
    X(ArgsOfRanks, ranks) /* [num_ranks] */ \
    X(u32, num_ranks)                       \
    X(u32, blocks_per_rank)
FASTKERN_RECORD(LaunchArgs, FASTKERN_LAUNCH_ARGS_FIELDS);
static_assert(sizeof(LaunchArgs) == 16, "layout");

}  // namespace fastkern
