#include "planner/core/traffic.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace fastkern {

u64 transfer_ps(u64 bytes, u64 ps_per_kib) {
    const unsigned __int128 ps = static_cast<unsigned __int128>(bytes) * ps_per_kib / 1024;
    constexpr u64 most = std::numeric_limits<i64>::max();
    return ps > most ? most : static_cast<u64>(ps);
}

namespace {

constexpr u64 kMost = std::numeric_limits<i64>::max();

[[noreturn]] void refuse(const std::string& text) { throw std::invalid_argument(text); }

void check_sum(unsigned __int128 sum, u64 row_bytes, const char* what, u32 index) {
    if (sum > kMost)
        refuse(std::string("traffic: the sum of ") + what + " " + std::to_string(index) +
               " passes 2^63 - 1 rows");
    if (sum * row_bytes > kMost)
        refuse(std::string("traffic: ") + what + " " + std::to_string(index) + " holds " +
               std::to_string(static_cast<u64>(sum)) + " rows of " + std::to_string(row_bytes) +
               " bytes, which passes 2^63 - 1 bytes");
}

}  // namespace

Traffic make_traffic(const i64* matrix, const Topology& topology, u64 row_bytes) {
    Traffic t;
    t.servers = topology.servers;
    t.gpus_per_server = topology.gpus_per_server;
    t.num_ranks = topology.num_ranks();
    const std::size_t r = t.num_ranks;
    t.rows.resize(r * r);
    u64 any = 0;
    for (std::size_t k = 0; k < r * r; ++k) {
        t.rows[k] = static_cast<u64>(matrix[k]);
        any |= t.rows[k];
    }
    if (any > kMost) {  // the sign bit of some entry is set
        const std::size_t k =
            std::find_if(matrix, matrix + r * r, [](i64 v) { return v < 0; }) - matrix;
        refuse("traffic[" + std::to_string(k / r) + "][" + std::to_string(k % r) + "] is " +
               std::to_string(matrix[k]) + ": rows must not be negative");
    }
    // One wide total usually proves every sum safe; only when it does not is each one looked at.
    unsigned __int128 total = 0;
    Vector<u64> column(r, 0);
    for (std::size_t s = 0; s < r; ++s)
        for (std::size_t d = 0; d < r; ++d) {
            total += t.rows[s * r + d];
            column[d] += t.rows[s * r + d];
        }
    if (total > kMost / row_bytes) {
        Vector<unsigned __int128> in(r, 0);
        for (std::size_t s = 0; s < r; ++s) {
            unsigned __int128 out = 0;
            for (std::size_t d = 0; d < r; ++d) {
                out += t.rows[s * r + d];
                in[d] += t.rows[s * r + d];
            }
            check_sum(out, row_bytes, "row", static_cast<u32>(s));
        }
        for (std::size_t d = 0; d < r; ++d)
            check_sum(in[d], row_bytes, "column", static_cast<u32>(d));
        if (total > kMost / row_bytes)
            refuse("traffic: the sum of all entries passes 2^63 - 1 " +
                   std::string(total > kMost ? "rows" : "bytes"));
    }
    t.max_output_rows = *std::max_element(column.begin(), column.end());

    const u32 n = t.servers, m = t.gpus_per_server;
    t.tiles.assign(static_cast<std::size_t>(n) * n, 0);
    for (u32 a = 0; a < n; ++a)
        for (u32 i = a * m; i < (a + 1) * m; ++i) {
            const u64* row = &t.rows[i * r];
            for (u32 b = 0; b < n; ++b) {
                if (b == a) continue;
                u64 sum = 0;
                for (u32 d = b * m; d < (b + 1) * m; ++d) sum += row[d];
                t.tiles[static_cast<std::size_t>(a) * n + b] += sum;
            }
        }
    for (u32 l = 0; l < m; ++l)
        for (u32 a = 0; a < n; ++a) {
            u64 out = 0, in = 0;
            for (u32 b = 0; b < n; ++b) {
                if (b == a) continue;
                out += t.rail_rows(a, b, l);
                in += t.rail_rows(b, a, l);
            }
            t.max_rail_out = std::max(t.max_rail_out, out);
            t.max_rail_in = std::max(t.max_rail_in, in);
        }
    return t;
}

namespace {

[[noreturn]] void refuse_tokens(u32 src, u32 server, const std::string& why) {
    refuse("tokens of rank " + std::to_string(src) + " for server " + std::to_string(server) +
           ": " + why);
}

}  // namespace

Traffic make_token_traffic(const i64* to_server, const i64* to_rank, const Topology& topology,
                           u64 row_bytes) {
    const u32 n = topology.servers, m = topology.gpus_per_server;
    const std::size_t r = topology.num_ranks();
    Vector<i64> matrix(r * r, 0);
    const Traffic ranks = make_traffic(to_rank, topology, row_bytes);  // checks signs and sums
    for (u32 s = 0; s < r; ++s)
        for (u32 b = 0; b < n; ++b) {
            u64 most = 0, sum = 0;
            for (u32 d = b * m; d < (b + 1) * m; ++d) {
                most = std::max(most, ranks.at(s, d));
                sum += ranks.at(s, d);
            }
            const u64 tokens = static_cast<u64>(to_server[s * n + b]);
            if (tokens < most || tokens > sum)
                refuse_tokens(s, b,
                              std::to_string(to_server[s * n + b]) + " for the server, but up to " +
                                  std::to_string(most) + " for a rank and " + std::to_string(sum) +
                                  " for all");
            if (b == s / m)
                std::copy_n(to_rank + s * r + b * m, m, &matrix[s * r + b * m]);
            else
                matrix[s * r + b * m + s % m] = to_server[s * n + b];
        }
    Traffic t = make_traffic(matrix.data(), topology, row_bytes);
    t.max_output_rows = ranks.max_output_rows;
    return t;
}

}  // namespace fastkern
