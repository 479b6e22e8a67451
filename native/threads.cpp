// The number of threads that may work at a time, and their processors.
#include "threads.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>

#ifdef __linux__
#include <unistd.h>
#endif

namespace dynaquant {
namespace {

std::optional<std::size_t> positive_number(std::string_view text) {
    std::size_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size() || number == 0) return {};
    return number;
}

// Returns DYNAQUANT_THREADS, which is the same for all threads; 0 if it is not set.
std::size_t requested_threads() {
    const char* const text = std::getenv("DYNAQUANT_THREADS");
    if (text == nullptr || *text == '\0') return 0;
    if (const auto number = positive_number(text)) return *number;
    throw std::invalid_argument("the environment variable DYNAQUANT_THREADS is '" + std::string(text) +
                                "', but has to be a whole number from 1");
}

// Returns this process's share of the processors if a launcher started several processes. Ignores OMP_NUM_THREADS,
// because torchrun sets it to 1 for every rank, however many processors there are.
std::size_t share_of_ranks() {
    const char* const text = std::getenv("LOCAL_WORLD_SIZE");
    const auto ranks = positive_number(text == nullptr ? "" : text);
    if (!ranks) return std::numeric_limits<std::size_t>::max();
    return std::max<std::size_t>(1, Processors::of_parent_process().count() / *ranks);
}

}  // namespace

#ifdef __linux__

Processors::Processors(int process) : known_(sched_getaffinity(process, sizeof set_, &set_) == 0) {
    if (!known_) CPU_ZERO(&set_);
}

Processors Processors::of_parent_process() { return Processors(getppid()); }

std::size_t Processors::count() const {
    return known_ ? static_cast<std::size_t>(CPU_COUNT(&set_)) : std::max(1u, std::thread::hardware_concurrency());
}

void Processors::hold_this_thread() const {
    // If this fails, the thread keeps its processors.
    if (known_) sched_setaffinity(0, sizeof set_, &set_);
}

bool Processors::operator==(const Processors& other) const {
    return known_ == other.known_ && CPU_EQUAL(&set_, &other.set_);
}

#else

Processors::Processors(int) {}

Processors Processors::of_parent_process() { return of_this_thread(); }

std::size_t Processors::count() const { return std::max(1u, std::thread::hardware_concurrency()); }

void Processors::hold_this_thread() const {}

bool Processors::operator==(const Processors&) const { return true; }

#endif

std::size_t thread_limit(const Processors& processors) {
    static const std::size_t requested = requested_threads();
    static const std::size_t share = share_of_ranks();
    return requested != 0 ? requested : std::min(processors.count(), share);
}

}  // namespace dynaquant
