// The stage table: the only definition of the bytes that the planner writes and every kernel reads.
//
// One little-endian block per rank: Header, then arrays of fixed-size records in this order:
//   Queue[8], Post[], Stage[], Stream[], Segment[], Link[]
// Chunks are never listed. Item k of a stage is chunk k / num_streams of stream
// first_stream + k % num_streams, and chunk c of a stream covers its rows
// [c * chunk_rows, min((c + 1) * chunk_rows, num_rows)); an item past the end of its stream is
// empty.
//
// The field lists below yield the structs, the layout assertions (here and in every device
// compile), and, through the extension module, the NumPy dtypes. No other header is included, so
// that NVRTC and the HIP compiler can read this file as it is.
#pragma once

namespace fastkern {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 kTableMagic = 0x54534b46;  // "FKST"
constexpr u32 kTableVersion = 3;
constexpr u32 kNoSlot = 0xffffffffu;  // "no flag": no gate, or no credit to post
constexpr u32 kValueBits = 16;        // a flag holds epoch << kValueBits | value, value >= 1
constexpr u32 kMaxValue = (1u << kValueBits) - 1;

// What a table is for. Dispatch is the all-to-all of a token's copies, one per server; combine is
// the same plan transposed, with sums on the way. What differs is said at each queue.
enum OpKind : u32 { kAllToAll, kDispatch, kCombine, kNumOps };

// Queues of a rank. Items of one queue are claimed in order, each only once it can run.
//   pack     own rows -> send staging of a proxy, own or a peer's: permute and balance at once
//            (combine: sums of own expert outputs -> partial rows of the proxy)
//   push     own rows -> window of a rank of the same server (for itself: straight to output)
//            (combine: sums of own expert outputs -> partial rows of a token's owner)
//   put      send staging -> receive staging of the peer, over scale-out
//   receive  receive staging -> windows of the local destinations (own rows: straight to output;
//            combine: to the owners' windows, one's own too)
//   land     window -> output, rows that a proxy redistributed (combine: a wait, no more)
//   take     window -> output, rows that a rank of the same server pushed (combine: a wait)
//   sum      combine: partial rows of the server's ranks -> send staging
//   reduce   combine: once all has landed, servers' sums -> output
enum QueueKind : u32 { kPack, kPush, kPut, kReceive, kLand, kTake, kSum, kReduce, kNumQueues };

enum PolicyKind : u32 { kWhole, kSplit, kDirect, kSpreadout, kNumPolicies };

// X(type, name): 8-byte fields first, then 4-byte fields in pairs: dense, no hidden padding.
#define FASTKERN_HEADER_FIELDS(X)                                                               \
    X(u64, table_bytes) /* the whole block */                                                   \
    X(u64, plan_hash)   /* FNV-1a over traffic, topology, options: equal on all ranks */        \
    X(u64, row_bytes)                                                                           \
    X(u64, input_rows)   /* rows of this rank's input, all destinations; combine: none */       \
    X(u64, output_rows)  /* of its output, all sources; dispatch: as window; combine: tokens */ \
    X(u64, send_rows)    /* send staging, the most that any rank needs: equal on all */         \
    X(u64, receive_rows) /* receive staging, likewise */                                        \
    X(u64, window_rows)  /* window, likewise */                                                 \
    X(u64, bound_rows)   /* most rows a rank sends or receives over scale-out, balanced */      \
    X(u64, scratch_rows) /* dispatch: Arrival records; combine: partial rows; equal on all */   \
    X(u64, scratch_row_bytes)                                                                   \
    X(u64, scratch_base) /* combine: partial rows of owners; those of proxies follow */         \
    X(u32, magic)                                                                               \
    X(u32, version)                                                                             \
    X(u32, rank)                                                                                \
    X(u32, num_ranks)                                                                           \
    X(u32, servers)                                                                             \
    X(u32, gpus_per_server)                                                                     \
    X(u32, chunk_slots) /* chunk flags per pair of ranks */                                     \
    X(u32, policy)      /* PolicyKind */                                                        \
    X(u32, num_posts)                                                                           \
    X(u32, num_stages)                                                                          \
    X(u32, num_streams)                                                                         \
    X(u32, num_segments)                                                                        \
    X(u32, num_links)                                                                           \
    X(u32, op)     /* OpKind */                                                                 \
    X(u32, server) /* of this rank */                                                           \
    X(u32, local_rank)

#define FASTKERN_QUEUE_FIELDS(X) \
    X(u64, num_items)            \
    X(u32, first_stage)          \
    X(u32, num_stages)

// A flag written at kernel start: ready, or the first credit of a receiver's order.
#define FASTKERN_POST_FIELDS(X)   \
    X(u32, rank) /* whose flag */ \
    X(u32, slot)                  \
    X(u32, value)                 \
    X(u32, reserved)

#define FASTKERN_STAGE_FIELDS(X)                                                     \
    X(u64, ticks_begin) /* see plan_time */                                          \
    X(u64, ticks_end)                                                                \
    X(u64, first_item) /* items of earlier stages of this queue */                   \
    X(u32, num_chunks) /* of the longest rail of this put: the same on every rail */ \
    X(u32, first_stream)                                                             \
    X(u32, num_streams)                                                              \
    X(u32, reserved)

// Rows that move together, cut into chunks.
#define FASTKERN_STREAM_FIELDS(X)                                                           \
    X(u64, num_rows)                                                                        \
    X(u64, chunk_rows)                                                                      \
    X(u64, source_row) /* put: send staging here; receive: receive staging here */          \
    X(u64, target_row) /* at peer: send staging (pack), window (push; own rows: output),  \
                               receive staging (put) */ \
    X(u32, peer)       /* rank written to (pack, push, put), or the writer awaited */       \
    X(u32, slot)       /* flag of chunk 0: at peer if written to, else here; + chunk */     \
    X(u32, gate_slot)  /* flag here, awaited before peer is written to; or kNoSlot */       \
    X(u32, gate_value)                                                                      \
    X(u32, credit_rank) /* receive: rank that gets the credit, */                           \
    X(u32, credit_slot) /*   its flag, or kNoSlot, */                                       \
    X(u32, credit_value)                                                                    \
    X(u32, credit_chunk) /*   posted when this chunk has arrived */                         \
    X(u32, first_segment)                                                                   \
    X(u32, num_segments)                                                                    \
    X(u32, first_link)                                                                      \
    X(u32, num_links)

// A contiguous part of a stream, in stream order; parts do not overlap.
#define FASTKERN_SEGMENT_FIELDS(X)                                                         \
    X(u64, stream_row) /* first row, counted from the start of the stream */               \
    X(u64, row)        /* pack, push: input row; receive, land, take: output/window row; \
                               combine pack: Arrival of chunk 0, push: window row of dispatch */ \
    X(u64, num_rows)                                                                       \
    X(u32, peer) /* put: source rank; receive: destination rank (dispatch: source rank) */ \
    X(u32, slot) /* put: flag here of chunk 0, pack or (combine) sum; + chunk */

// receive: a destination of the stream: ready is awaited here, the landing flag is written there.
// sum: a contributor, whose pack flag is awaited here.
#define FASTKERN_LINK_FIELDS(X)                                              \
    X(u32, rank)                                                             \
    X(u32, slot)      /* landing flag at rank of chunk 0; + chunk */         \
    X(u32, gate_slot) /* ready flag here, or kNoSlot for this rank itself */ \
    X(u32, reserved)

#define FASTKERN_FIELD(type, name) type name;
#define FASTKERN_SIZE(type, name) +sizeof(type)
#define FASTKERN_RECORD(Name, FIELDS) \
    struct Name {                     \
        FIELDS(FASTKERN_FIELD)        \
    };                                \
    static_assert(sizeof(Name) == (0 FIELDS(FASTKERN_SIZE)), #Name " has hidden padding")

FASTKERN_RECORD(Header, FASTKERN_HEADER_FIELDS);
FASTKERN_RECORD(Queue, FASTKERN_QUEUE_FIELDS);
FASTKERN_RECORD(Post, FASTKERN_POST_FIELDS);
FASTKERN_RECORD(Stage, FASTKERN_STAGE_FIELDS);
FASTKERN_RECORD(Stream, FASTKERN_STREAM_FIELDS);
FASTKERN_RECORD(Segment, FASTKERN_SEGMENT_FIELDS);
FASTKERN_RECORD(Link, FASTKERN_LINK_FIELDS);

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "u32 and u64 are 4 and 8 bytes");
static_assert(sizeof(Header) == 160 && sizeof(Queue) == 16 && sizeof(Post) == 16, "layout");
static_assert(sizeof(Stage) == 40 && sizeof(Stream) == 80, "layout");
static_assert(sizeof(Segment) == 32 && sizeof(Link) == 16, "layout");

#if defined(__CUDACC__) || defined(__HIP__)
#define FASTKERN_HD __host__ __device__
#else
#define FASTKERN_HD
#endif

// Plan time of an item: its place in the global order. Strictly increasing along every dependency,
// on all ranks, and never falling within a queue: so the earliest item not yet run can always run.
FASTKERN_HD inline u64 plan_time(u32 queue, const Stage& stage, u32 chunk) {
    const u64 ended = (queue == kReceive || queue == kLand) ? 1 : 0;  // after the chunk has crossed
    const u64 ticks = (stage.ticks_end - stage.ticks_begin) * (chunk + ended) / stage.num_chunks;
    const u32 phase = queue == kPut                        ? 2
                      : queue == kReceive || queue == kSum ? 1
                      : queue == kLand || queue == kTake   ? 3
                                                           : 0;
    return (stage.ticks_begin + ticks) * 4 + phase;
}

// Where each array of a table starts.
struct TableView {
    const Header* header;
    const Queue* queues;
    const Post* posts;
    const Stage* stages;
    const Stream* streams;
    const Segment* segments;
    const Link* links;
};

FASTKERN_HD inline TableView view_table(const u8* block) {
    TableView t;
    t.header = reinterpret_cast<const Header*>(block);
    t.queues = reinterpret_cast<const Queue*>(t.header + 1);
    t.posts = reinterpret_cast<const Post*>(t.queues + kNumQueues);
    t.stages = reinterpret_cast<const Stage*>(t.posts + t.header->num_posts);
    t.streams = reinterpret_cast<const Stream*>(t.stages + t.header->num_stages);
    t.segments = reinterpret_cast<const Segment*>(t.streams + t.header->num_streams);
    t.links = reinterpret_cast<const Link*>(t.segments + t.header->num_segments);
    return t;
}

FASTKERN_HD inline u64 table_bytes(const Header& h) {
    return sizeof(Header) + kNumQueues * sizeof(Queue) + h.num_posts * u64{sizeof(Post)} +
           h.num_stages * u64{sizeof(Stage)} + h.num_streams * u64{sizeof(Stream)} +
           h.num_segments * u64{sizeof(Segment)} + h.num_links * u64{sizeof(Link)};
}

// The flags of one rank, in 64-bit words. Every slot has one writer. Ready and credit are exempt
// from the ready gate, so they are indexed by writer alone, for ever; the others are written only
// after the owner said that it is in this call.
//   ready [writer rank]                        writer's buffers are free
//   credit[writer rank]                        writer's receive staging takes our next put
//   pack  [writer local rank][put peer's server][chunk]   (direct: [destination][chunk], own)
//   arrive[writer rank][chunk]                 a put's chunk is in receive staging
//   land  [writer local rank][source server][chunk]       (direct: never)
//   push  [writer local rank][chunk]
//   sum   [put peer's server][chunk]              own, combine
struct FlagLayout {
    u32 num_ranks, servers, gpus_per_server, chunk_slots;

    FASTKERN_HD u32 ready(u32 writer) const { return writer; }
    FASTKERN_HD u32 credit(u32 writer) const { return num_ranks + writer; }
    FASTKERN_HD u32 pack(u32 writer_local, u32 server) const {
        return 2 * num_ranks + (writer_local * servers + server) * chunk_slots;
    }
    FASTKERN_HD u32 pack_direct(u32 destination) const {
        return 2 * num_ranks + destination * chunk_slots;
    }
    FASTKERN_HD u32 arrive(u32 writer) const {
        return 2 * num_ranks + (num_ranks + writer) * chunk_slots;
    }
    FASTKERN_HD u32 land(u32 writer_local, u32 server) const {
        return 2 * num_ranks + (2 * num_ranks + writer_local * servers + server) * chunk_slots;
    }
    FASTKERN_HD u32 push(u32 writer_local) const {
        return 2 * num_ranks + (3 * num_ranks + writer_local) * chunk_slots;
    }
    FASTKERN_HD u32 sum(u32 server) const { return push(gpus_per_server) + server * chunk_slots; }
    FASTKERN_HD u32 num_slots() const { return sum(servers); }
    // Arrival record of a land flag: one per flag, in the same order.
    FASTKERN_HD u32 arrival(u32 land_slot) const { return land_slot - land(0, 0); }
    FASTKERN_HD u32 num_arrivals() const { return num_ranks * chunk_slots; }
};

// What a proxy tells a rank of its server about a chunk of a dispatch, for one source: the rows it
// has put into that rank's window, and where it wants their sums in a combine. One per source of
// the server that the chunk came from: M of them make one scratch row.
#define FASTKERN_ARRIVAL_FIELDS(X)                             \
    X(u32, window_row)                                         \
    X(u32, num_rows)                                           \
    X(u32, partial_row) /* of the proxy, after scratch_base */ \
    X(u32, reserved)
FASTKERN_RECORD(Arrival, FASTKERN_ARRIVAL_FIELDS);
static_assert(sizeof(Arrival) == 16, "layout");

// The moving part of a rank's heap: send staging, receive staging, window, scratch, in this order,
// each starting on a multiple of 256 bytes. Equal on all ranks, because the header's sizes are the
// maxima.
struct DataLayout {
    u64 send, receive, window, scratch, bytes;
};

FASTKERN_HD inline u64 round_up_256(u64 n) { return (n + 255) / 256 * 256; }

FASTKERN_HD inline DataLayout data_layout(const Header& h) {
    DataLayout d;
    d.send = 0;
    d.receive = round_up_256(h.send_rows * h.row_bytes);
    d.window = d.receive + round_up_256(h.receive_rows * h.row_bytes);
    d.scratch = d.window + round_up_256(h.window_rows * h.row_bytes);
    d.bytes = d.scratch + round_up_256(h.scratch_rows * h.scratch_row_bytes);
    return d;
}

}  // namespace fastkern
