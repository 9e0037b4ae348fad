// A CPU allocator for torch that counts, and poisons where it is asked to: every request passes through it, whichever
// thread or library makes it.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

std::mutex mutex;
std::unordered_map<void*, long long> sizes;
long long live = 0, peak = 0;
c10::Allocator* torch_allocator = nullptr;

constexpr int POISON = 0xff;  // of every byte: a NaN of each floating-point type
bool poisons = false;
std::vector<std::pair<unsigned char*, long long>> withheld;  // given back, and not used again meanwhile

void release(void* data) {
  if (data == nullptr) return;
  {
    std::lock_guard<std::mutex> guard(mutex);
    long long bytes = sizes[data];
    live -= bytes;
    sizes.erase(data);
    if (poisons) {
      std::memset(data, POISON, bytes);
      withheld.emplace_back(static_cast<unsigned char*>(data), bytes);
      return;
    }
  }
  torch_allocator->raw_deleter()(data);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = torch_allocator->raw_allocate(bytes);
    if (data != nullptr) {
      std::lock_guard<std::mutex> guard(mutex);
      sizes[data] = static_cast<long long>(bytes);
      live += static_cast<long long>(bytes);
      if (live > peak) peak = live;
      if (poisons) std::memset(data, POISON, bytes);
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Counting counting;

}  // namespace

extern "C" {

void install() {
  if (torch_allocator == nullptr) torch_allocator = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&counting, 255);
}

// What was allocated meanwhile still finds its way back.
void uninstall() { c10::SetCPUAllocator(torch_allocator, 255); }

void poison() {
  std::lock_guard<std::mutex> guard(mutex);
  poisons = true;
}

// Gives back what was withheld; returns how many bytes of it were written after they had been released.
long long stop_poisoning() {
  std::lock_guard<std::mutex> guard(mutex);
  long long written = 0;
  for (auto [data, bytes] : withheld) {
    for (long long place = 0; place < bytes; ++place) written += data[place] != POISON;
    torch_allocator->raw_deleter()(data);
  }
  withheld.clear();
  poisons = false;
  return written;
}

long long live_bytes() {
  std::lock_guard<std::mutex> guard(mutex);
  return live;
}

// The highest point since the last call, or since the beginning.
long long take_peak_bytes() {
  std::lock_guard<std::mutex> guard(mutex);
  long long highest = peak;
  peak = live;
  return highest;
}
}
