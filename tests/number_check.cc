// The conversions of kernels/body/number.h as a filter, for test_number.py: reads values of one
// type from standard input, writes those of another to standard output.  Usage: number_check
// bfloat16|float16 widen|round
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/body/number.h"

using namespace fastkern;

namespace {

template <class T>
std::vector<T> read_all() {
    std::vector<T> values;
    T part[4096];
    for (std::size_t n; (n = std::fread(part, sizeof(T), 4096, stdin)) > 0;)
        values.insert(values.end(), part, part + n);
    return values;
}

template <class T>
void write_all(const std::vector<T>& values) {
    std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    const u32 kind = std::strcmp(argv[1], "bfloat16") == 0 ? kBFloat16 : kFloat16;
    if (std::strcmp(argv[2], "widen") == 0) {
        const std::vector<u16> from = read_all<u16>();
        std::vector<float> to(from.size());
        for (std::size_t k = 0; k < from.size(); ++k)
            load_value(reinterpret_cast<const u8*>(&from[k]), kind, &to[k]);
        write_all(to);
    } else {
        const std::vector<float> from = read_all<float>();
        std::vector<u16> to(from.size());
        for (std::size_t k = 0; k < from.size(); ++k)
            store_value(reinterpret_cast<u8*>(&to[k]), kind, from[k]);
        write_all(to);
    }
}
