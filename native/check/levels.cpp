// Checks the coder of levels without Python, for processors that only an emulator has (make native-arm).
//
// Without arguments: codes blocks of many kinds with all instructions of the processor, and prints a checksum of their
// bytes, which is the same everywhere. With the arguments SPREAD SHARE INSTRUCTIONS TURNS TURNS: codes a block so many
// times each way, for instructions.py. Its weights have a standard deviation of SPREAD grid steps, and this share of
// their levels changes (1: there is no parent).
#include "../level_rans.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <stdexcept>

#include "../cpu.hpp"
#include "../frequencies.hpp"
#include "../nearest.hpp"
#include "../tables.hpp"

using namespace dynaquant;
using namespace dynaquant::level_rans;

namespace {

using Bytes = std::vector<std::uint8_t>;

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "broken contract: %s\n", what);
    std::exit(1);
}

// A copy of bytes that ends where a page begins that must not be touched.
class Guarded {
public:
    explicit Guarded(std::span<const std::uint8_t> bytes) : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
        room_ = (bytes.size() + page_ - 1) / page_ * page_;
        begin_ = static_cast<std::uint8_t*>(
            mmap(nullptr, room_ + page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        require(begin_ != MAP_FAILED && mprotect(begin_ + room_, page_, PROT_NONE) == 0, "memory can be guarded");
        copy_ = {begin_ + room_ - bytes.size(), bytes.size()};
        std::copy(bytes.begin(), bytes.end(), copy_.begin());
    }
    ~Guarded() { munmap(begin_, room_ + page_); }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;

    std::span<std::uint8_t> bytes() const { return copy_; }

private:
    std::size_t page_, room_;
    std::uint8_t* begin_;
    std::span<std::uint8_t> copy_;
};

// Levels, those of the parent (none: no parent), and how they are coded.
struct Block {
    Bytes levels, parent, level_of;
    unsigned states;
    std::size_t columns;
    std::vector<EncoderStep> steps;
    DecoderTable table{};

    // of: at parent level << 8 | symbol, all 256 levels in some order.
    Block(Bytes these, Bytes before, Bytes of, unsigned with)
        : levels(std::move(these)), parent(std::move(before)), level_of(std::move(of)), states(with),
          columns(highest_of(levels) + std::size_t{1}) {
        std::vector<Counts> occurs(highest_of(parent) + std::size_t{1});
        for (std::size_t i = 0; i < levels.size(); ++i) ++occurs[parent.empty() ? 0 : parent[i]][levels[i]];
        steps.resize(occurs.size() * columns);
        table.slots.resize(occurs.size() * frequency_total);
        for (std::size_t source = 0; source < occurs.size(); ++source) add(source, occurs[source]);
        level_of.resize(level_of.size() + 3);  // vectors read four bytes where they need one
        table.level_of = level_of.data();
    }

    Bytes encode() const {
        Bytes out;
        encode_block(levels, parent.empty() ? nullptr : parent.data(), {columns, steps}, states, out);
        return out;
    }

    // Returns nothing if the stream is damaged. in_place: the levels take the place of the parent's.
    std::optional<Bytes> decode(std::span<const std::uint8_t> stream, bool in_place = false) const {
        const Guarded coded(stream), sources(parent), other(levels);
        const auto out = in_place ? sources.bytes() : other.bytes();
        if (!in_place) std::fill(out.begin(), out.end(), std::uint8_t{0xEE});
        try {
            decode_block(coded.bytes(), parent.empty() ? nullptr : sources.bytes().data(), table, states, out);
        } catch (const std::invalid_argument&) {
            return std::nullopt;
        }
        return Bytes(out.begin(), out.end());
    }

private:
    // occurs: how often each level occurs after this level of the parent.
    void add(std::size_t source, const Counts& occurs) {
        const std::uint8_t* const level = level_of.data() + (source << 8);
        Counts counts;
        for (std::size_t s = 0; s < counts.size(); ++s) counts[s] = occurs[level[s]];
        const Frequencies frequencies = scaled(counts);
        Slot* slot = table.slots.data() + source * frequency_total;
        std::uint32_t begin = 0;
        for (std::uint32_t s = 0; s < frequencies.size(); ++s) {
            const std::uint32_t frequency = frequencies[s];
            if (frequency > 0) steps[source * columns + level[s]] = step_of(begin, frequency);
            for (std::uint32_t offset = 0; offset < frequency; ++offset)
                *slot++ = slot_of(parent.empty() ? level[s] : s, frequency, offset);
            begin += frequency;
            if (s >= near_symbols) continue;
            table.near[s][source] = level[s];
            table.ends[s][source] = static_cast<std::uint16_t>(begin);
        }
        table.group[source] = static_cast<std::uint8_t>(source);
    }
};

// Returns a block of a random kind: how many levels, parent's levels and states there are, and how likely the first
// levels are.
Block some(std::mt19937& random) {
    const auto one_of = [&](auto... values) {
        const std::array all = {values...};
        return all[random() % all.size()];
    };
    const unsigned sources = one_of(0u, 1u, 3u, 16u, 17u, 64u, 65u, 256u), symbols = one_of(1u, 2u, 3u, 4u, 30u, 256u);
    const unsigned states = one_of(1u, 4u, 8u, 8u, 16u, 16u, 32u, 32u), likely = one_of(0u, 50u, 90u, 99u);
    const unsigned most = one_of(100u, 5000u);
    const std::size_t size = random() % most;
    Bytes level_of(65536);
    for (std::size_t row = 0; row < level_of.size(); row += 256) {
        for (unsigned s = 0; s < 256; ++s) level_of[row + s] = static_cast<std::uint8_t>(s);
        for (unsigned s = symbols; s > 1; --s) std::swap(level_of[row + s - 1], level_of[row + random() % s]);
    }
    Bytes levels(size), parent(sources == 0 ? 0 : size);
    for (auto& level : parent) level = static_cast<std::uint8_t>(random() % sources);
    for (std::size_t i = 0; i < size; ++i) {
        const std::size_t symbol = random() % 100 < likely ? random() % std::min(symbols, 2u) : random() % symbols;
        levels[i] = level_of[(parent.empty() ? std::size_t{0} : parent[i]) << 8 | symbol];
    }
    return {std::move(levels), std::move(parent), std::move(level_of), states};
}

// Calls work with each set of instructions.
template <class Work>
void with_all_instructions(Work&& work) {
    for (int most = static_cast<int>(supported_instructions()); most >= 0; --most) {
        limit_instructions(static_cast<Instructions>(most));
        work();
    }
    limit_instructions(supported_instructions());
}

void check() {
    constexpr int blocks = 2000;
    std::mt19937 random(0);
    std::uint64_t checksum = 0xCBF29CE484222325;  // FNV-1a
    for (int i = 0; i < blocks; ++i) {
        const Block block = some(random);
        const Bytes stream = block.encode();
        for (const auto byte : stream) checksum = (checksum ^ byte) * 0x100000001B3;
        Bytes damaged = stream;
        damaged[random() % damaged.size()] ^= static_cast<std::uint8_t>(1u << random() % 8);
        const auto shorter = std::span(stream).first(random() % stream.size());
        const auto of_damaged = block.decode(damaged), of_shorter = block.decode(shorter);
        with_all_instructions([&] {
            require(block.encode() == stream, "all instructions give the same bytes");
            require(block.decode(stream) == block.levels, "all instructions give the levels back");
            if (!block.parent.empty())
                require(block.decode(stream, true) == block.levels, "levels may take the place of the parent's");
            require(block.decode(damaged) == of_damaged, "a damaged stream means the same to all instructions");
            require(block.decode(shorter) == of_shorter, "a short stream means the same to all instructions");
        });
    }
    std::printf("%d blocks, checksum %016llx\n", blocks, static_cast<unsigned long long>(checksum));
}

// Returns a block of weights on a grid (see above).
Block weights(double spread, double share) {
    constexpr std::size_t size = 8'000;
    std::mt19937 random(0);
    std::normal_distribution<double> normal;
    const auto level_at = [](double position) {
        const long multiple = std::lround(std::clamp(position, -127.0, 127.0));
        return static_cast<std::uint8_t>(multiple > 0 ? 2 * multiple : multiple < 0 ? 1 - 2 * multiple : 0);
    };
    Bytes levels(size), parent(size), level_of(65536);
    for (std::size_t i = 0; i < size; ++i) {
        const double before = spread * normal(random);
        parent[i] = level_at(before);
        levels[i] = level_at(before + share * 1.25 * (1 + share / 2) * normal(random));
    }
    std::vector<double> positions(256);
    for (std::size_t level = 2; level < positions.size(); ++level)
        positions[level] = level % 2 == 0 ? static_cast<double>(level / 2) : -static_cast<double>(level / 2);
    const auto sources = std::span(positions).first(highest_of(parent) + std::size_t{1});
    nearest_levels(positions, sources, true, std::span<std::uint8_t, 65536>(level_of));
    if (share == 1) return {std::move(parent), {}, std::move(level_of), most_states};
    return {std::move(levels), std::move(parent), std::move(level_of), most_states};
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 6) return check(), 0;
    const Block block = weights(std::atof(arguments[1]), std::atof(arguments[2]));
    const Bytes stream = block.encode();
    limit_instructions(static_cast<Instructions>(std::atoi(arguments[3])));
    for (int turns = std::atoi(arguments[4]); turns > 0; --turns)
        require(block.encode() == stream, "all instructions give the same bytes");
    for (int turns = std::atoi(arguments[5]); turns > 0; --turns)
        require(block.decode(stream) == block.levels, "all instructions give the levels back");
}
