// Python's view of route, handles and the arguments of dispatch and combine.
#pragma once

#include <nanobind/nanobind.h>

namespace fastkern {

void bind_moe(nanobind::module_& m);

}  // namespace fastkern
