// The number of threads that may work at a time, and their processors.
#pragma once

#include <cstddef>

#ifdef __linux__
#include <sched.h>
#endif

namespace dynaquant {

// The processors that a thread may use. If the system cannot restrict threads, all processors.
class Processors {
public:
    static Processors of_this_thread() { return Processors(0); }
    // Returns the processors of the process that started this one.
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

// Returns how many threads a call may use, the calling thread included, if that may use these processors.
//
// If the environment has DYNAQUANT_THREADS, it is that number. Otherwise it is the number of processors. But if
// LOCAL_WORLD_SIZE says that a launcher started several processes on this machine, it is at most this process's share
// of the launcher's processors, because ranks that are not pinned all see every processor. The environment is read
// once. Throws std::invalid_argument if DYNAQUANT_THREADS is not a positive number.
std::size_t thread_limit(const Processors& processors);

}  // namespace dynaquant
