// An arena and the vectors that lie in it: prints the first check that fails and exits with 1.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "planner/core/arena.h"

using namespace fastkern;

#define CHECK(what)                                             \
    do {                                                        \
        if (!(what)) {                                          \
            std::printf("line %d: not: %s\n", __LINE__, #what); \
            std::exit(1);                                       \
        }                                                       \
    } while (0)

namespace {

Arena* place(const Vector<int>& v) { return v.get_allocator().arena(); }

bool refuses_reset(Arena* arena) {
    try {
        arena->reset();
    } catch (const std::logic_error&) {
        return true;
    }
    return false;
}

void blocks_stay() {
    Arena arena;
    for (int pass = 0; pass < 5; ++pass) {
        arena.reset();
        const ArenaScope scope(&arena);
        std::vector<Vector<int>> many;
        for (int k = 0; k < 100; ++k) many.emplace_back(1000, k);
        const Vector<char> odd(3, 'x');
        const Vector<char> aligned(3, 'x');
        CHECK(reinterpret_cast<std::uintptr_t>(odd.data()) % 16 == 0);
        CHECK(reinterpret_cast<std::uintptr_t>(aligned.data()) % 16 == 0);
        const Vector<char> large(1 << 20, 'x');  // larger than a block usually is
        for (int k = 0; k < 100; ++k) CHECK(many[k].front() == k && many[k].back() == k);
        CHECK(arena.used_bytes() == 100 * 4000 + 2 * 16 + (1 << 20));
        if (pass == 0) CHECK(arena.num_blocks_ever() > 1);
    }
    const std::size_t blocks = arena.num_blocks_ever();
    arena.reserve(2 << 20);
    CHECK(arena.num_blocks_ever() == blocks + 1);
    const ArenaScope scope(&arena);
    const Vector<char> first(1 << 20), second((1 << 20) - 16), last(16);
    CHECK(arena.num_blocks_ever() == blocks + 1);
    const Vector<char> more(1);
    CHECK(arena.num_blocks_ever() == blocks + 2);
}

void nothing_outlives_a_reset() {
    Arena arena;
    {
        const ArenaScope scope(&arena);
        Vector<int> alive(10, 1);
        CHECK(refuses_reset(&arena));
        alive.assign(1000, 2);  // the old memory is given back, the new is not
        CHECK(refuses_reset(&arena));
    }
    CHECK(!refuses_reset(&arena));
    CHECK(arena.used_bytes() == 0);
}

void vectors_keep_their_place() {
    Arena arena, other;
    Vector<int> heap(10, 1);
    CHECK(!place(heap));
    {
        const ArenaScope scope(&arena);
        Vector<int> inside(10, 2);
        CHECK(place(inside) == &arena);
        heap = inside;
        CHECK(!place(heap) && heap[9] == 2);
        heap = std::move(inside);  // one by one: the places differ
        CHECK(!place(heap) && heap[9] == 2);
        heap.resize(1000);  // grows where it was made
        CHECK(!place(heap));

        const Vector<int> copy(heap);  // lies where it is made
        CHECK(place(copy) == &arena && copy == heap);
        Vector<int> source(10, 3);
        const int* data = source.data();
        Vector<int> moved(std::move(source));
        CHECK(place(moved) == &arena && moved.data() == data);
        Vector<int> target;
        target = std::move(moved);  // the same place: the memory itself
        CHECK(target.data() == data);
        {
            const ArenaScope inner(&other);
            const Vector<int> elsewhere(target);
            CHECK(place(elsewhere) == &other && elsewhere == target);
            const ArenaScope none(nullptr);
            CHECK(!place(Vector<int>(target)));
        }
        CHECK(place(Vector<int>()) == &arena);
        Vector<int> a(3, 1), b(5, 2);
        std::swap(a, b);
        CHECK(a.size() == 5 && b.size() == 3);
        std::thread([] { CHECK(!place(Vector<int>())); }).join();
    }
    CHECK(!place(Vector<int>()));
    CHECK(heap.size() == 1000 && heap[9] == 2);
    CHECK(!refuses_reset(&arena) && !refuses_reset(&other));
}

void a_scope_ends_with_an_exception() {
    Arena arena;
    try {
        const ArenaScope scope(&arena);
        const Vector<int> inside(10, 1);
        throw std::runtime_error("");
    } catch (const std::runtime_error&) {
    }
    CHECK(!current_arena());
    CHECK(!refuses_reset(&arena));
}

}  // namespace

int main() {
    blocks_stay();
    nothing_outlives_a_reset();
    vectors_keep_their_place();
    a_scope_ends_with_an_exception();
    return 0;
}
