// The Python module dynaquant._native: NumPy arrays in, NumPy arrays or bytes out. The long functions release the GIL.
// std::invalid_argument becomes ValueError.
#include "bindings.hpp"

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu.hpp"
#include "tables.hpp"
#include "threads.hpp"

namespace {

std::vector<std::string> instructions() {
    const auto most = static_cast<std::ptrdiff_t>(dynaquant::supported_instructions());
    return {dynaquant::instruction_names.begin(), dynaquant::instruction_names.begin() + most + 1};
}

void limit_instructions(const std::string& most) {
    for (std::size_t i = 0; i < dynaquant::instruction_names.size(); ++i)
        if (dynaquant::instruction_names[i] == most)
            return dynaquant::limit_instructions(static_cast<dynaquant::Instructions>(i));
    throw std::invalid_argument("there are no instructions '" + most + "'");
}

std::size_t threads() { return dynaquant::thread_limit(dynaquant::Processors::of_this_thread()); }

}  // namespace

NB_MODULE(_native, m) {
    using nb::literals::operator""_a;
    m.attr("LEVEL_PRUNED") = dynaquant::level_pruned;
    m.attr("LEVEL_PROTECTED") = dynaquant::level_protected;
    m.attr("UNDECIDED") = dynaquant::undecided;
    m.def("threads", &threads,
          "Returns how many threads a call may use, the calling thread included (docs/guide.md).\n"
          "ValueError: DYNAQUANT_THREADS is not a positive number.");
    m.def("instructions", &instructions,
          "Returns the sets of instructions that functions of this module have loops for and this processor can run,\n"
          "from 'plain' to the one that is used.");
    m.def("limit_instructions", &limit_instructions, "most"_a,
          "Makes all functions use at most these instructions, for tests and benchmarks. Results are the same.\n"
          "ValueError: not one of instructions().");

    bind_values(m);
    bind_moments(m);
    bind_coding(m);
}
