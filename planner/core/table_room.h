// How many records a table has at most, before any count is known.
#pragma once

#include "planner/stage_table.h"

namespace fastkern {

// Records of one table.
struct RecordCounts {
    u64 posts = 0, stages = 0, streams = 0, segments = 0, links = 0;

    u64 bytes() const {  // of the whole table
        return sizeof(Header) + kNumQueues * sizeof(Queue) + posts * sizeof(Post) +
               stages * sizeof(Stage) + streams * sizeof(Stream) + segments * sizeof(Segment) +
               links * sizeof(Link);
    }
};

// The most of each kind that the tables of a rank have, of a dispatch planned as whole tiles and of
// its combine, whatever the counts.
//
// N servers of M ranks; a rank has up to N - 1 puts out and as many in. A source's rows of a tile
// are one piece on each rail that carries some. A source either gives rows away, being above its
// rail's share, and then its rail carries none but its own; or it gives none.
//
//   dispatch   stages       streams               segments              links
//   pack       N - 1        M (N - 1)             M (N - 1) \ together
//   put        N - 1        N - 1                 M (N - 1) / (M + 1) (N - 1)
//   receive    N - 1        N - 1                 M (N - 1)             (M - 1) (N - 1)
//   land *     N - 1        (M - 1) (N - 1)       (M - 1) (N - 1)
//   push       1            M                     M
//   take *     1            M - 1                 M - 1
//
//   combine    stages       streams               segments              links
//   pack *     N - 1        (M - 1) (N - 1)       (M - 1) (N - 1)
//   put        N - 1        N - 1                 N - 1
//   receive    N - 1        N - 1                 M (N - 1) \ together   M (N - 1)
//   land       N - 1        M (N - 1)             M (N - 1) / (M + 1) (N - 1)
//   sum        N - 1        N - 1                 N - 1                 (M - 1) (N - 1)
//   push *     1            M - 1                 M - 1
//   take *     1            M - 1                 M - 1
//   reduce     1            1                     1
//
//   * where M > 1. Posts: ready to M - 1 ranks, and the first credit where N > 1.
RecordCounts most_records_of_dispatch(u32 servers, u32 gpus_per_server);
RecordCounts most_records_of_combine(u32 servers, u32 gpus_per_server);

// Room for most tables of other plans; they may have more.
RecordCounts usual_records(u32 servers, u32 gpus_per_server);

// The most bytes of the same tables. Both are reached: by a rank whose tiles out
// hold M rows of its own or more and none of others, where all sources of the tiles in have rows
// for its rail, all ranks of its server rows for one another, and it has a token.
inline u64 most_bytes_of_dispatch(u32 servers, u32 gpus_per_server) {
    return most_records_of_dispatch(servers, gpus_per_server).bytes();
}
// A rank with M streams of a tile to land gave rows away, so that its receive has one link; one
// with M links has one stream to land, which is less.
inline u64 most_bytes_of_combine(u32 servers, u32 gpus_per_server) {
    return most_records_of_combine(servers, gpus_per_server).bytes() -
           u64{servers - 1} * (gpus_per_server - 1) * sizeof(Link);
}

}  // namespace fastkern
