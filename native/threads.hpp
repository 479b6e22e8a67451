// How many threads may work at a time, and on which processors.
#pragma once

#include <cstddef>

#ifdef __linux__
#include <sched.h>
#endif

namespace dynaquant {

// The processors that a thread may use. All of them where the system does not restrict threads to some.
class Processors {
public:
    static Processors of_this_thread() { return Processors(0); }
    // Of the process that started this one.
    static Processors of_parent_process();

    std::size_t count() const;
    // Restricts the calling thread to these processors.
    void hold_this_thread() const;
    bool operator==(const Processors& other) const;

private:
    explicit Processors(int process);  // 0: the calling thread

#ifdef __linux__
    cpu_set_t set_;
    bool known_;  // false on machines with more processors than a cpu_set_t has room for
#endif
};

// How many threads a call may keep busy, the calling thread included, when that may use these processors. It is
// DYNAQUANT_THREADS where the environment has it. Else it is the number of processors; but where LOCAL_WORLD_SIZE says
// that a launcher started several processes on this machine, no more than this process's share of the launcher's
// processors: ranks that are not pinned all see every processor. The environment is read once. Throws
// std::invalid_argument when DYNAQUANT_THREADS is no positive number.
std::size_t thread_limit(const Processors& processors);

}  // namespace dynaquant
