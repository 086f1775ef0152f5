// Memory for planning: given out in order and taken back all at once, so that a warm planner asks
// the heap for nothing. Without an arena vectors are those of the heap.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace fastkern {

// Blocks that stay when what lay in them is gone. For one thread at a time.
class Arena {
  public:
    static constexpr std::size_t kAlignment = 16;

    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    void* allocate(std::size_t bytes) {
        bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
        if (bytes > left_) open_block(bytes);
        void* result = at_;
        at_ += bytes;
        left_ -= bytes;
        used_bytes_ += bytes;
        ++num_alive_;
        return result;
    }
    void deallocate() noexcept { --num_alive_; }

    // Begins anew in the same blocks. Throws std::logic_error while anything made here is alive.
    void reset() {
        if (num_alive_) throw std::logic_error("an arena is reset under what lies in it");
        used_bytes_ = 0;
        enter(0);
    }

    // Begins anew with one block, for what used_bytes() counts up to `bytes`, in whatever order.
    void reserve(std::size_t bytes) {
        reset();
        blocks_.clear();
        add_block(bytes);
        enter(0);
    }

    std::size_t used_bytes() const { return used_bytes_; }            // since it was reset
    std::size_t num_blocks_ever() const { return num_blocks_ever_; }  // asked of the heap so far

  private:
    struct Block {
        std::unique_ptr<std::byte[]> data;
        std::size_t bytes;
    };
    static constexpr std::size_t kFirstBlock = 64 * 1024;
    static_assert(__STDCPP_DEFAULT_NEW_ALIGNMENT__ >= kAlignment, "blocks come from operator new");

    void enter(std::size_t block) {
        current_ = block;
        const bool there = block < blocks_.size();
        at_ = there ? blocks_[block].data.get() : nullptr;
        left_ = there ? blocks_[block].bytes : 0;
    }
    void add_block(std::size_t bytes) {
        blocks_.push_back({std::unique_ptr<std::byte[]>(new std::byte[bytes]), bytes});
        ++num_blocks_ever_;
    }
    void open_block(std::size_t bytes) {
        std::size_t next = at_ ? current_ + 1 : current_;
        while (next < blocks_.size() && blocks_[next].bytes < bytes) ++next;
        if (next == blocks_.size()) {
            const std::size_t usual = blocks_.empty() ? kFirstBlock : 2 * blocks_.back().bytes;
            add_block(bytes > usual ? bytes : usual);
        }
        enter(next);
    }

    std::vector<Block> blocks_;
    std::size_t current_ = 0, left_ = 0, used_bytes_ = 0, num_alive_ = 0, num_blocks_ever_ = 0;
    std::byte* at_ = nullptr;
};

// Where this thread's new vectors lie; nullptr: on the heap.
inline Arena*& current_arena() {
    thread_local Arena* arena = nullptr;
    return arena;
}

// What is made inside lies in the arena, and must be gone before it is reset.
class ArenaScope {
  public:
    explicit ArenaScope(Arena* arena) : outer_(current_arena()) { current_arena() = arena; }
    ~ArenaScope() { current_arena() = outer_; }
    ArenaScope(const ArenaScope&) = delete;
    ArenaScope& operator=(const ArenaScope&) = delete;

  private:
    Arena* outer_;
};

// A vector keeps the place that it was made for. It takes another's memory only when it is made
// from it (move construction) or when both lie in the same place; otherwise elements move one by
// one, so that a vector of the heap never holds memory of an arena. A copy lies where it is made.
// Vectors of different places must not be swapped, as std::vector says.
template <class T>
class ArenaAllocator {
  public:
    using value_type = T;
    using propagate_on_container_copy_assignment = std::false_type;
    using propagate_on_container_move_assignment = std::false_type;
    using propagate_on_container_swap = std::false_type;
    using is_always_equal = std::false_type;
    static_assert(alignof(T) <= Arena::kAlignment, "blocks are aligned to 16 bytes");

    ArenaAllocator() noexcept : arena_(current_arena()) {}
    template <class U>
    ArenaAllocator(const ArenaAllocator<U>& other) noexcept : arena_(other.arena()) {}

    T* allocate(std::size_t count) {
        if (count > static_cast<std::size_t>(-1) / 2 / sizeof(T)) throw std::bad_alloc();
        if (arena_) return static_cast<T*>(arena_->allocate(count * sizeof(T)));
        return static_cast<T*>(::operator new(count * sizeof(T)));
    }
    void deallocate(T* memory, std::size_t) noexcept {
        if (arena_)
            arena_->deallocate();
        else
            ::operator delete(memory);
    }
    ArenaAllocator select_on_container_copy_construction() const { return {}; }
    Arena* arena() const noexcept { return arena_; }

    template <class U>
    bool operator==(const ArenaAllocator<U>& other) const noexcept {
        return arena_ == other.arena();
    }
    template <class U>
    bool operator!=(const ArenaAllocator<U>& other) const noexcept {
        return arena_ != other.arena();
    }

  private:
    Arena* arena_;
};

template <class T>
using Vector = std::vector<T, ArenaAllocator<T>>;

}  // namespace fastkern
