// What one access of 16 bytes moves.
#pragma once

#include "planner/stage_table.h"

namespace fastkern {

struct alignas(16) Words16 {
    u32 x, y, z, w;
};

}  // namespace fastkern
