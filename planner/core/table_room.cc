#include "planner/core/table_room.h"

namespace fastkern {

namespace {

u64 most_posts(u64 n, u64 m) { return m - 1 + (n > 1 ? 1 : 0); }

}  // namespace

RecordCounts most_records_of_dispatch(u32 servers, u32 gpus_per_server) {
    const u64 n = servers, m = gpus_per_server, others = n - 1, in_server = m > 1 ? 1 : 0;
    RecordCounts c;
    c.posts = most_posts(n, m);
    c.stages = others * (3 + in_server) + 1 + in_server;
    c.streams = others * (m + 1 + 1 + (m - 1)) + m + (m - 1);
    c.segments = others * ((m + 1) + m + (m - 1)) + m + (m - 1);
    c.links = others * (m - 1);
    return c;
}

RecordCounts most_records_of_combine(u32 servers, u32 gpus_per_server) {
    const u64 n = servers, m = gpus_per_server, others = n - 1, in_server = m > 1 ? 1 : 0;
    RecordCounts c;
    c.posts = most_posts(n, m);
    c.stages = others * (4 + in_server) + 2 * in_server + 1;
    c.streams = others * ((m - 1) + 1 + 1 + m + 1) + 2 * (m - 1) + 1;
    c.segments = others * ((m - 1) + 1 + (m + 1) + 1) + 2 * (m - 1) + 1;
    c.links = others * (m + (m - 1));
    return c;
}

RecordCounts usual_records(u32 servers, u32 gpus_per_server) {
    const u64 n = servers, m = gpus_per_server;
    return {most_posts(n, m), 4 * n + 2, m * (2 * n + 2), 2 * m * m * n + m, m * n};
}

}  // namespace fastkern
